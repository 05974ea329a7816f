"""Float32 graphs compute what transformers computes, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from edge_spec.bundle import Bundle, open_bundle
from edge_spec.export import export_pair
from edge_spec.runtime.model import Model
from tiny_models import LLAMA3_ROPE, LONGROPE, TOKENS, VARIANTS, YARN, random_model, save_checkpoint

Logits = npt.NDArray[np.float32]

TOLERANCE = 1e-4
CONTEXT = 96

# Query heads that share a key-value head: hidden size, query heads, key-value heads.
GROUPS = {1: (64, 4, 4), 3: (96, 6, 2), 7: (112, 7, 1)}
CASES: dict[str, dict[str, Any]] = {
    f"{family}-{'tied' if tied else 'untied'}-group{group}": {
        "family": family,
        "tie_word_embeddings": tied,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    for family in ("llama", "qwen2")
    for tied in (True, False)
    for group, (hidden, heads, kv_heads) in GROUPS.items()
}
CASES |= {
    "llama-every-bias": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"family": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama-other-theta": {"family": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama-wide-heads": {"family": "llama", "head_dim": 32, "num_hidden_layers": 3},
    "mistral-without-window": {"family": "mistral", "sliding_window": None},
}
CASES |= {
    "llama-yarn": {"family": "llama", "rope_parameters": YARN},
    "llama-yarn-own-magnitude": {
        "family": "llama",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False},
    },
    "mistral-window": {"family": "mistral", "sliding_window": 24},
    "mistral-window-of-3": {"family": "mistral", "sliding_window": 3},
    "qwen2-late-windows": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"family": "qwen3", "num_hidden_layers": 3},
    "qwen3-untied-with-bias": {"family": "qwen3", "attention_bias": True, "tie_word_embeddings": False},
    "qwen3-wide-heads": {"family": "qwen3", "head_dim": 32},
    "smollm3": {"family": "smollm3", "num_hidden_layers": 4},
    "smollm3-listed": {"family": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]},
    "smollm3-windows": {
        "family": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    "gemma3": VARIANTS["gemma3"],
    "gemma3-wide-heads": {**VARIANTS["gemma3"], "head_dim": 32, "query_pre_attn_scalar": 32},
    "phi3": {"family": "phi3", "tie_word_embeddings": False},
    "phi3-window": {"family": "phi3", "sliding_window": 20},
    "phi3-longrope": {"family": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    "phi3-part-of-the-head": {"family": "phi3", "head_dim": 32, "partial_rotary_factor": 0.5},
    "granite": VARIANTS["granite"],
    "granite-with-biases": {**VARIANTS["granite"], "attention_bias": True, "mlp_bias": True},
}

# Eight nodes, parents before children: each entry is the parent's index, -1 for a root.
TREE = (-1, 0, 1, 0, 3, 1, -1, 6)


@dataclass(frozen=True)
class Exported:
    """A model as transformers has it, and as it was exported."""

    reference: PreTrainedModel
    bundle: Bundle
    models: dict[bool, Model] = field(default_factory=dict)

    def expected(self, token_ids: Sequence[int]) -> Logits:
        """Logits of every token by one pass of transformers, float32 [tokens, vocab]."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([list(token_ids)])).logits[0]
        return logits.numpy()[:, : self.bundle.manifest.vocab_size]

    def model(self, exact_rows: bool = True) -> Model:
        """The exported model with an empty cache, whose buffers still hold what earlier tests left there."""
        if exact_rows not in self.models:
            record = self.bundle.manifest.target
            self.models[exact_rows] = Model(
                self.bundle, record, ["CPUExecutionProvider"], CONTEXT, exact_rows, threads=1
            )
        self.models[exact_rows].cache.rollback(0)
        return self.models[exact_rows]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    reference = random_model(**request.param)
    folder = tmp_path_factory.mktemp("parity")
    checkpoint = save_checkpoint(folder / "checkpoint", reference)
    report = export_pair(checkpoint, None, folder / "bundle", recipe="fp32", check=False)
    return Exported(reference, open_bundle(report.path))


@pytest.fixture(scope="module")
def text() -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(0, TOKENS, 80)]


def close(actual: Logits, expected: Logits) -> None:
    assert actual.shape == expected.shape
    # A flat model would agree with anything.
    assert np.ptp(expected) > 2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def path_to(node: int) -> list[int]:
    """Nodes from the root down to ``node``."""
    return [] if node < 0 else [*path_to(TREE[node]), node]


def tree_mask() -> npt.NDArray[np.bool_]:
    mask = np.zeros((len(TREE), len(TREE)), bool)
    for node in range(len(TREE)):
        mask[node, path_to(node)] = True
    return mask


def test_one_pass_over_a_prompt(exported: Exported, text: list[int]) -> None:
    close(exported.model().forward(text, range(len(text))), exported.expected(text))


def test_logits_of_a_few_rows_are_those_rows(exported: Exported, text: list[int]) -> None:
    rows = [79, 0, 41]
    close(exported.model().forward(text, rows), exported.expected(text)[rows])


@pytest.mark.parametrize("exact_rows", [False, True])
def test_single_steps(exported: Exported, text: list[int], exact_rows: bool) -> None:
    model = exported.model(exact_rows)
    model.prefill(text[:70])
    steps = [model.forward([token], [0]).copy() for token in text[70:]]
    close(np.concatenate(steps), exported.expected(text)[70:])


def test_chunks_of_eight(exported: Exported, text: list[int]) -> None:
    model = exported.model()
    chunks = [model.forward(text[start : start + 8], range(8)).copy() for start in range(0, 80, 8)]
    close(np.concatenate(chunks), exported.expected(text))


@pytest.mark.parametrize("prefix", [1, 33])
def test_a_tree_of_eight_nodes_equals_its_paths(exported: Exported, text: list[int], prefix: int) -> None:
    nodes = text[60:68]
    depth = [len(path_to(node)) - 1 for node in range(len(TREE))]
    model = exported.model()
    model.prefill(text[:prefix])
    actual = model.forward(nodes, range(8), positions=[prefix + level for level in depth], mask=tree_mask())
    paths = [[*text[:prefix], *(nodes[step] for step in path_to(node))] for node in range(len(TREE))]
    close(actual, np.stack([exported.expected(path)[-1] for path in paths]))


@pytest.mark.parametrize("exact_rows", [False, True])
def test_after_a_rollback_the_dropped_tokens_are_forgotten(
    exported: Exported, text: list[int], exact_rows: bool
) -> None:
    model = exported.model(exact_rows)
    model.prefill(text[:40])
    model.forward(text[60:68], range(8), mask=tree_mask(), positions=[40, 41, 42, 41, 42, 42, 40, 41])
    model.cache.rollback(30)
    close(model.forward(text[30:46], range(16)), exported.expected(text[:46])[30:])
    model.cache.rollback(0)
    close(model.forward(text[50:51], [0]), exported.expected(text[50:51]))


def test_a_full_cache_still_answers_right(exported: Exported) -> None:
    tokens = [int(token) for token in np.random.default_rng(8).integers(0, TOKENS, CONTEXT)]
    model = exported.model()
    model.prefill(tokens[:-1])
    close(model.forward(tokens[-1:], [0]), exported.expected(tokens)[-1:])
