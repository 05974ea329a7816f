"""EAGLE-3 heads: the layouts they are published in become graphs that compute what their authors' code does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_spec.bundle import open_bundle
from edge_spec.export.add_head import add_head
from edge_spec.manifest import HEAD_IDS
from edge_spec.runtime.model import Model
from head_checkpoints import Tensors, eagle3_tensors, llama_config, rms_norm, run_layer, save_head, speculators
from head_graph import HeadGraph
from tiny_models import SIZES, TOKENS, random_model, save_checkpoint

HIDDEN, VOCABULARY, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], 6
TAPS = [2, 4, 5]
# Not in the order of their ids, as heads may have them.
IDS = [int(token) for token in np.random.default_rng(3).permutation(TOKENS)[:100]]


class Reference:
    """The head in torch, over all rows of a text at once: ``states`` [rows, hidden] beside the ids that follow."""

    def __init__(self, tensors: Tensors, embedding: Tensor, **options: bool) -> None:
        self.tensors, self.embedding, self.options = tensors, embedding, options
        self.layer = {name.removeprefix("midlayer."): value for name, value in tensors.items() if "midlayer." in name}

    def fused(self, taps: np.ndarray) -> Tensor:
        states = torch.from_numpy(taps)
        if self.options.get("norm_before_fc"):
            states = rms_norm(states, self.tensors["input_norm.weight"])
        return states @ self.tensors["fc.weight"].T

    def run(self, states: Tensor, ids: list[int]) -> tuple[np.ndarray, Tensor]:
        embedded = rms_norm(self.embedding[ids], self.layer["input_layernorm.weight"])
        normed = rms_norm(states, self.layer["hidden_norm.weight"])
        residual = normed if self.options.get("norm_before_residual") else states
        output = run_layer(self.layer, torch.cat([embedded, normed], -1), residual)
        final = rms_norm(output, self.tensors["norm.weight"])
        return (final @ self.tensors["lm_head.weight"].T).numpy(), final if self.options.get("norm_output") else output


def in_id_order(logits: np.ndarray) -> np.ndarray:
    return logits[:, np.argsort(IDS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), random_model(seed=4, num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def embedding(target: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from edge_spec.export import export_pair

    folder, written = tmp_path_factory.mktemp("bundles"), {}

    def exported(recipe: str) -> Path:
        if recipe not in written:
            written[recipe] = export_pair(target, None, folder / recipe, recipe=recipe, check=False).path
        return written[recipe]

    return exported


def head_of(folder: Path, options: dict[str, Any] | None = None) -> tuple[Path, Tensors]:
    tensors = eagle3_tensors(HIDDEN, IDS, VOCABULARY)
    config = llama_config(HIDDEN, len(IDS), VOCABULARY)
    if options is None:
        return save_head(folder, {**config, "eagle_aux_hidden_state_layer_ids": TAPS}, tensors), tensors
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(8))
    written = speculators(config, tensors, eagle_aux_hidden_state_layer_ids=TAPS, **options)
    return save_head(folder, *written), tensors


LAYOUTS = {
    "specforge": None,
    "speculators": {"norm_before_residual": False},
    "speculators, normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("stored", "recipe", "error"),
    [("fp32", "fp32", 1e-4), ("w8a8", "fp32", 0.02), ("w8a8", "w8a8", 0.1), ("int4", "int4", 0.7)],
)
def test_a_head_computes_what_the_reference_does(
    layout: str, stored: str, recipe: str, error: float, bundle: Any, embedding: Tensor, tmp_path: Path
) -> None:
    options = LAYOUTS[layout]
    checkpoint, tensors = head_of(tmp_path / "head", options)
    path = add_head(bundle(stored), checkpoint, output=tmp_path / "bundle", recipe=recipe).path
    head, reference = HeadGraph(path), Reference(tensors, embedding, **(options or {}))
    random = np.random.default_rng(5)
    taps = random.normal(size=(20, 3 * HIDDEN)).astype(np.float32)
    ids = [int(token) for token in random.integers(0, TOKENS, 30)]

    def near(found: np.ndarray, expected: np.ndarray, feature: bool = False) -> None:
        if feature and recipe == "w8a8":  # in a basis of the head's own
            found, expected = (np.linalg.norm(rows, axis=-1) for rows in (found, expected))
        scale = max(1.0, float(np.abs(expected).mean()))
        assert np.abs(found - expected).mean() < error * scale
        if recipe == stored == "fp32":
            assert np.abs(found - expected).max() < error * scale

    # A prompt in two pieces, then a chain of own features.
    head.call(ids[:7], taps[:7])
    found, feature = head.call(ids[7:12], taps[7:12])
    states = reference.fused(taps[:12])
    expected, features = reference.run(states, ids[:12])
    near(found, in_id_order(expected)[7:])
    near(feature, features[7:].numpy(), feature=True)
    for step in range(12, 15):
        found, feature = head.call([ids[step]], None, feature[-1:], every=False)
        states = torch.cat([states, features[-1:]])
        expected, features = reference.run(states, ids[: step + 1])
        near(found, in_id_order(expected)[-1:])
        near(feature, features[-1:].numpy(), feature=True)
    # Two of the drafted rows were rejected: the target's own states come in their place, with a feature behind them.
    head.length = 12
    found, feature = head.call([*ids[20:24], ids[25]], taps[12:16], feature)
    states = torch.cat([reference.fused(taps[:16]), features[-1:]])
    expected, features = reference.run(states, [*ids[:12], *ids[20:24], ids[25]])
    near(found, in_id_order(expected)[12:])
    # Rows were missed: the head begins anew, at position 0.
    head.length = 0
    found, _ = head.call(ids[16:20], taps[16:20])
    expected, _ = reference.run(reference.fused(taps[16:20]), ids[16:20])
    near(found, in_id_order(expected))


def test_columns_are_in_the_order_of_their_ids(bundle: Any, tmp_path: Path) -> None:
    path = add_head(bundle("fp32"), head_of(tmp_path / "head")[0], output=tmp_path / "bundle", recipe="fp32").path
    head = open_bundle(path).manifest.head
    assert head is not None and head.names_columns
    assert np.frombuffer((path / HEAD_IDS).read_bytes(), "<u4").tolist() == sorted(IDS)


@pytest.mark.parametrize("stored", ["fp32", "w8a8"])
def test_from_the_targets_own_hidden_states(stored: str, bundle: Any, target: Path, tmp_path: Path) -> None:
    """End to end: what the target's graphs tell is what the authors' code would give the head."""
    from transformers import AutoModelForCausalLM

    checkpoint, tensors = head_of(tmp_path / "head")
    path = add_head(bundle(stored), checkpoint, output=tmp_path / "bundle", recipe="fp32").path
    opened = open_bundle(path)
    assert opened.manifest.head is not None
    model = Model(opened, opened.manifest.target, ["CPUExecutionProvider"], 64, True, threads=1, taps=tuple(TAPS))
    ids = [int(token) for token in np.random.default_rng(7).integers(0, TOKENS, 16)]
    model.forward(ids[:9], (0,))
    model.forward(ids[9:15], (0,))
    assert model.cache.taps is not None
    found, _ = HeadGraph(path).call(ids[1:16], model.cache.taps.read(0, 15))

    original = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32)
    with torch.no_grad():
        states = original(torch.tensor([ids]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap][0, :15] for tap in TAPS], -1).numpy()
    reference = Reference(tensors, original.get_input_embeddings().weight.detach())
    expected, _ = reference.run(reference.fused(taps), ids[1:16])
    limit = 1e-3 if stored == "fp32" else 0.1
    assert np.abs(found - in_id_order(expected)).mean() < limit * np.abs(expected).mean()
