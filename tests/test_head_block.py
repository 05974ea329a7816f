"""Heads that fill a block at once, DFlash and DSpark: what they compute, and that no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_heads import block_config, block_hidden, block_tensors, dspark_tensors

from edge_spec.bundle import Bundle, open_bundle
from edge_spec.export import export_pair
from edge_spec.export.add_head import add_head
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.drafters.block import BlockDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_block import BlockReading
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from head_checkpoints import save_head
from stub_model import context_of
from tiny_models import SIZES, TOKENS, random_model, save_checkpoint

HIDDEN, VOCABULARY = SIZES["hidden_size"], SIZES["vocab_size"]
TARGET_LAYERS, LAYERS, IDS, RANK = 5, 2, [0, 3], 6
CPU = ["CPUExecutionProvider"]


class Pair:
    """A target with a head, exported, and both as torch has them."""

    def __init__(self, folder: Path, kind: str, recipe: str = "fp32", family: str = "qwen3", **changes: Any) -> None:
        self.model = random_model(family, seed=5, num_hidden_layers=TARGET_LAYERS, **changes)
        self.tensors = block_tensors(HIDDEN, len(IDS), LAYERS)
        self.config = block_config(kind, HIDDEN, VOCABULARY, LAYERS, IDS)
        if kind == "dspark":
            self.tensors |= dspark_tensors(HIDDEN, VOCABULARY, RANK)
            self.config |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
            self.config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        checkpoint = save_checkpoint(folder / "target", self.model, eos=None)
        export_pair(checkpoint, None, folder / "bundle", recipe=recipe, check=False)
        add_head(folder / "bundle", save_head(folder / "head", self.config, self.tensors), recipe=recipe)
        self.bundle: Bundle = open_bundle(folder / "bundle")

    def load(self) -> tuple[Model, BlockHead]:
        manifest = self.bundle.manifest
        assert manifest.head is not None
        target = Model(self.bundle, manifest.target, CPU, 200, True, threads=1, taps=manifest.head.taps)
        return target, BlockHead(self.bundle, manifest.head, CPU, threads=1)

    def hidden(self, text: list[int], start: int = 0) -> torch.Tensor:
        """The head's output, float32 [block, hidden], if reading began with token ``start``."""
        with torch.no_grad():
            states = self.model.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            taps = torch.cat([states[layer + 1][0] for layer in IDS], -1)[start:]
            return block_hidden(self.tensors, self.config, taps, text[-1], self.model.model.embed_tokens.weight)

    def expected(self, text: list[int], start: int = 0) -> np.ndarray:
        """Logits of the places behind a text, float32 [places, ids], without what the token before says."""
        with torch.no_grad():
            logits = (self.hidden(text, start) @ self.model.lm_head.weight.T).numpy()
        return logits[1 if "dflash_config" in self.config else 0 :, :TOKENS]


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("block"), request.param)


def numbers(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, count)]


def test_logits_are_those_of_the_reference(pair: Pair) -> None:
    """After a prompt, after tokens that were rejected, after a pause, and in a second turn that goes on elsewhere."""
    target, head = pair.load()
    reading = BlockReading(head, head.context)
    text = numbers(1, 20)

    def drafted(places: int) -> np.ndarray:
        logits, _ = reading.draft(text, target.cache.taps, places)
        return logits

    target.prefill(text[:-1])
    np.testing.assert_allclose(drafted(head.tokens), pair.expected(text), atol=1e-4)
    np.testing.assert_allclose(drafted(head.tokens), pair.expected(text), atol=1e-4)  # nothing new was told since
    target.forward([text[-1], 3, 4, 5], (0,))  # of these three tokens one is accepted
    target.cache.rollback(len(text) + 1)
    text += [3, 9]
    np.testing.assert_allclose(drafted(2), pair.expected(text)[:2], atol=1e-4)
    for token in numbers(2, 11):  # a pause, in which others draft
        target.forward([text[-1]], (0,))
        text.append(token)
    np.testing.assert_allclose(drafted(head.tokens), pair.expected(text), atol=1e-4)
    kept = 12
    target.cache.rollback(kept)
    text = text[:kept] + numbers(3, 9)
    target.forward(text[kept:-1], (0,))
    np.testing.assert_allclose(drafted(head.tokens), pair.expected(text), atol=1e-4)


def test_a_head_that_missed_the_beginning_reads_what_is_there(pair: Pair) -> None:
    target, head = pair.load()
    reading, text = BlockReading(head, head.context), numbers(4, 30)
    target.prefill(text[:-1])
    target.cache.taps.release(13)
    assert reading.rows(text, target.cache.taps) == (13, 29)
    logits, _ = reading.draft(text, target.cache.taps, head.tokens)
    np.testing.assert_allclose(logits, pair.expected(text, 13), atol=1e-4)


def test_confidence_is_that_of_the_reference(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "dspark")
    target, head = pair.load()
    text = numbers(5, 12)
    target.prefill(text[:-1])
    reading = BlockReading(head, head.context)
    logits, scores = reading.draft(text, target.cache.taps, head.tokens)
    before = 7
    with torch.no_grad():
        hidden = pair.hidden(text)
        row = pair.tensors["markov_head.markov_w1.weight"][before]
        biased = torch.tensor(logits) + pair.tensors["markov_head.markov_w2.weight"][:TOKENS] @ row
        read = torch.cat([hidden, row.expand(len(hidden), -1)], -1)
        weight, bias = (pair.tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        confidence = (read @ weight.T + bias)[:, 0].numpy()
    markov = head.markov
    assert markov is not None and scores is not None
    np.testing.assert_allclose(scores + markov.confidence(before), confidence, atol=1e-4)
    columns, found = markov.biased(logits[1], before)
    np.testing.assert_allclose(found, biased[1].numpy()[columns], atol=1e-4)
    assert int(columns[found.argmax()]) == int(biased[1].argmax())
