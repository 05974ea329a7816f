"""Heads that fill a block at once, DFlash and DSpark: what they compute, and that no text changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from block_heads import block_config, block_hidden, block_tensors, dspark_tensors

from edge_spec.bundle import Bundle, new_bundle, open_bundle
from edge_spec.errors import BundleError, CheckpointError, EdgeSpecError
from edge_spec.export import export_pair
from edge_spec.export.add_head import add_head
from edge_spec.manifest_check import check_manifest
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.drafters.block import BlockDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_block import MOST_ROWS, BlockReading
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.loop import decode, prefill
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import FixedDraft
from edge_spec.runtime.verification import RULES
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
        return target, BlockHead(self.bundle, manifest.head, CPU, manifest.context_length, threads=1)

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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: Pair(tmp_path_factory.mktemp(kind), kind) for kind in ("dflash", "dspark")}


@pytest.fixture(params=["dflash", "dspark"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


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


def test_a_long_prompt_is_read_in_calls_of_limited_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair.load()
    reading, text, rows = BlockReading(head, head.context), numbers(11, 190), []
    whole = BlockHead.draft

    def noted(self: BlockHead, cache: KVCache, taps: np.ndarray, *about: int) -> Any:
        rows.append(len(taps))
        return whole(self, cache, taps, *about)

    monkeypatch.setattr(BlockHead, "draft", noted)
    target.prefill(text[:-1])
    logits, _ = reading.draft(text, target.cache.taps, head.tokens)
    assert rows == [MOST_ROWS, 189 - MOST_ROWS]
    np.testing.assert_allclose(logits, pair.expected(text), atol=1e-4)


def test_what_was_read_of_another_text_is_dropped_with_the_gap_behind_it(pair: Pair) -> None:
    target, head = pair.load()
    reading, first = BlockReading(head, head.context), numbers(12, 40)
    target.prefill(first[:-1])
    reading.draft(first, target.cache.taps, 1)
    text = first[:5] + numbers(13, 50)
    target.cache.rollback(5)
    target.prefill(text[5:-1])
    target.cache.taps.release(20)  # as of a long prompt, whose last hidden states alone are kept
    assert reading.cached_after(text, target.cache.taps) == len(text) - 1 - 20
    logits, _ = reading.draft(text, target.cache.taps, head.tokens)
    np.testing.assert_allclose(logits, pair.expected(text, 20), atol=1e-4)


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended(pair: Pair) -> None:
    target, head = pair.load()
    drafter, text = BlockDrafter(head, target), numbers(14, 20)
    for turn in range(3):
        context = context_of(text, SamplingParams(temperature=0.0))
        drafter.switch(context)
        target.prefill(text[target.cache.length : -1])
        assert drafter.unread(context) == (19 if turn == 0 else 10)
        drafter.propose(context, Budget(2))
        text = text + numbers(15 + turn, 10)


def test_confidence_is_that_of_the_reference(pairs: dict[str, Pair]) -> None:
    pair = pairs["dspark"]
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


@pytest.mark.parametrize(("recipe", "error"), [("w8a8", 0.15), ("int4", 0.6)])
@pytest.mark.parametrize("tied", [True, False])
def test_stored_smaller_it_stays_close(recipe: str, error: float, tied: bool, tmp_path: Path) -> None:
    """Also where the target's stored lm_head has the target's own norm and a rotation in it."""
    pair = Pair(tmp_path, "dspark", recipe, tie_word_embeddings=tied)
    target, head = pair.load()
    text = numbers(6, 20)
    target.prefill(text[:-1])
    logits, _ = BlockReading(head, head.context).draft(text, target.cache.taps, head.tokens)
    expected = pair.expected(text)
    spread = expected.std()
    assert np.abs(logits - expected).mean() < error * spread
    assert np.abs(logits - np.roll(expected, 1, axis=0)).mean() > error * spread


def generated(pair: Pair, drafting: str, params: SamplingParams, rule: str = "coupled") -> tuple[list[int], int, int]:
    """A text, and how many tokens of it were drafted and accepted."""
    target, head = pair.load()
    speculation = None
    if drafting != "plain":
        speculation = FixedDraft(BlockDrafter(head, target), 5, drafting == "tree")
    context = context_of([3, 43, 7], params, rule)
    for _ in prefill(target, context):
        pass
    rounds = list(decode(target, speculation, context, RULES[rule], 60))
    return context.tokens, sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafting", ["chain", "tree"])
def test_heads_change_no_token(pair: Pair, drafting: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    plain, _, _ = generated(pair, "plain", params)
    text, drafted, _ = generated(pair, drafting, params)
    assert text == plain and drafted > 60


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_chains_are_drawn_for_the_other_rules(pair: Pair, rule: str) -> None:
    _, drafted, accepted = generated(pair, "chain", SamplingParams(temperature=1.0, seed=3), rule)
    assert drafted > 60 and accepted > 0


def test_a_window_drops_the_oldest_and_goes_on(pair: Pair) -> None:
    target, head = pair.load()
    reading, text = BlockReading(head, 16), numbers(7, 12)
    target.prefill(text[:-1])
    for token in numbers(8, 40):
        logits, _ = reading.draft(text, target.cache.taps, head.tokens)
        assert reading.cache.length <= 16 and np.isfinite(logits).all()
        target.forward([text[-1]], (0,))
        text.append(token)
    reading.narrow(8)
    assert reading.cache.length <= 8
    reading.draft(text, target.cache.taps, head.tokens)
    reading.rollback(3)
    assert reading.cache.length == 0


def test_texts_take_turns_without_reading_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "dflash", max_position_embeddings=1024)  # room for more than one cache
    target, head = pair.load()
    drafter = BlockDrafter(head, target)
    contexts, caches, first = [], [target.cache, target.new_cache()], []
    for seed, cache in enumerate(caches):
        context = context_of(numbers(20 + seed, 15), SamplingParams(temperature=0.0))
        target.use(cache)
        drafter.switch(context)
        target.prefill(context.tokens[:-1])
        assert drafter.unread(context) == 14
        first.append(drafter.propose(context, Budget(4)).tokens)
        contexts.append(context)
    for context, cache, tokens in zip(contexts, caches, first, strict=True):
        target.use(cache)
        drafter.switch(context)
        assert drafter.unread(context) == 1 and drafter.cached(context) == 14
        assert drafter.propose(context, Budget(4)).tokens == tokens


def test_places_of_tokens_that_are_proposed_are_left_out(pair: Pair) -> None:
    target, head = pair.load()
    context = context_of(numbers(30, 15), SamplingParams(temperature=0.0))
    target.prefill(context.tokens[:-1])
    drafter = BlockDrafter(head, target)
    whole = drafter.propose(context, Budget(4))
    rest = drafter.propose(context, Budget(4), whole.tokens[:2])
    assert rest.tokens == whole.tokens[2:4] + rest.tokens[2:] and len(rest) == head.tokens - 2
    assert len(drafter.propose(context, Budget(4), [1] * head.tokens)) == 0


def test_a_head_that_fails_is_given_up_and_comes_back(pair: Pair) -> None:
    target, head = pair.load()
    drafter = BlockDrafter(head, target, load=lambda: pair.load()[1])
    context = context_of(numbers(31, 15), SamplingParams(temperature=0.0))
    target.prefill(context.tokens[:-1])
    before = drafter.propose(context, Budget(4)).tokens

    def fail(*call: Any) -> None:
        raise RuntimeError("the disk is on fire")

    head._session.run = fail  # type: ignore[method-assign]
    assert len(drafter.propose(context, Budget(4))) == 0 and not drafter.ready
    assert drafter.memory_bytes == 0 and drafter.unread(context) == 0
    drafter.reload()
    assert drafter.unread(context) == 1  # what it had read is gone, and with it the rows that the target told
    assert len(drafter.propose(context, Budget(4))) == len(before)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "no head that is supported"),
    ("dflash", {"dflash_config": {"mask_token_id": 1}}, "target_layer_ids is None"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3, 0]}}, "expected ascending"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, True]}}, "expected ascending"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1, 3]}}, "names the embedding"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 4]}}, "target's last layer"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 9]}}, "the target's last is 4"),
    ("dflash", {"dflash_config": {"mask_token_id": 900, "target_layer_ids": IDS}}, "masks with token 900"),
    ("dflash", {"dflash_config": {"mask_token_id": -1, "target_layer_ids": IDS}}, "'mask_token_id' is -1"),
    ("dflash", {"dflash_config": [1]}, "expected an object"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": IDS, "causal": True}}, "causal is True"),
    ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": IDS, "markov_rank": 4}}, "which row"),
    ("dflash", {"block_size": 1}, "'block_size' is 1"),
    ("dflash", {"block_size": 100_000}, "expected at most 64"),
    ("dflash", {"hidden_size": 128}, "128"),
    ("dflash", {"model_type": "llama"}, "expected 'qwen3'"),
    ("dflash", {"attention_bias": True}, "attention_bias"),
    ("dflash", {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 8}, "window"),
    ("dspark", {"markov_head_type": "rnn"}, "only 'vanilla'"),
    ("dspark", {"markov_rank": 7}, "expected"),
    ("dspark", {"markov_rank": 1 << 20}, "expected at most"),
    ("dspark", {"markov_rank": 0}, "markov_rank is 0"),
    ("dspark", {"vocab_size": 100, "mask_token_id": 5}, "vocabulary"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_a_checkpoint_that_is_not_such_a_head_is_refused(
    kind: str, changes: dict[str, Any], message: str, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair = pairs[kind]
    head = save_head(tmp_path / "head", {**pair.config, **changes}, pair.tensors)
    with pytest.raises(EdgeSpecError, match=message):
        add_head(pair.bundle.path, head, output=tmp_path / "bundle", recipe="fp32")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "markov_head.markov_w2.weight"])
@pytest.mark.parametrize("fault", ["missing", "another shape", "not finite"])
def test_a_damaged_tensor_is_refused_by_its_name(name: str, fault: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["dspark"]
    tensors = dict(pair.tensors)
    if fault == "missing":
        del tensors[name]
    elif fault == "another shape":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    head = save_head(tmp_path / "head", pair.config, tensors)
    with pytest.raises(CheckpointError, match=name):
        add_head(pair.bundle.path, head, output=tmp_path / "bundle", recipe="fp32")


def changed(pair: Pair, folder: Path, change: Callable[[onnx.ModelProto], None]) -> Bundle:
    """The pair's bundle with another graph of its head, sealed anew."""
    with new_bundle(folder) as (copy, seal):
        for name in pair.bundle.manifest.files:
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_bytes((pair.bundle.path / name).read_bytes())
        path = copy / "target" / "head.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        onnx.save(model, path)
        seal(replace(pair.bundle.manifest, files={}))
    return open_bundle(folder)


def set_constant(name: str, values: np.ndarray) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))

    return change


def rotate_further(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "RotaryEmbedding" and attribute.name == "num_heads":
                attribute.i = 16


def attend_causally(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[10:]


def gather_other_rows(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Gather" and "query_rows" in node.input:
            node.input[1] = "key_rows"


@pytest.mark.parametrize(
    "change",
    [
        set_constant("mask_ids", np.full((1, 4), VOCABULARY, np.int64)),
        set_constant("mask_ids", np.full((1, 4), -1, np.int64)),
        set_constant("mask_ids", np.full((1, 5), 1, np.int64)),
        set_constant("block_start", np.array([-6], np.int64)),
        rotate_further,
        attend_causally,
        gather_other_rows,
    ],
)
def test_a_graph_that_the_exporter_does_not_write_is_refused(
    change: Callable[[onnx.ModelProto], None], pairs: dict[str, Pair], tmp_path: Path
) -> None:
    bundle = changed(pairs["dspark"], tmp_path / "bundle", change)
    with pytest.raises(BundleError, match="no graph this edge-spec runs"):
        BlockHead(bundle, bundle.manifest.head, CPU, 256, threads=1)


def test_tables_of_another_size_are_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    head = pairs["dspark"].bundle.manifest.head
    assert head is not None
    for wrong in (replace(head, markov_rank=RANK + 1), replace(head, kind="dflash"), replace(head, tokens=1000)):
        with pytest.raises(ValueError, match=r"bytes|neither|expected 1 to 64"):
            check_manifest(replace(pairs["dspark"].bundle.manifest, head=wrong))
