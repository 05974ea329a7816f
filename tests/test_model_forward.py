"""The model's forward: rows do not depend on their companions, and nothing but the tokens held can be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, RequestError
from edge_spec.export import export_pair
from edge_spec.manifest import CacheType
from edge_spec.runtime.model import PREFILL_ROWS, Model
from row_independence import require_bitwise_kernels, require_int8_attention
from tiny_models import TOKENS, random_model, save_checkpoint

CONTEXT = 160

# Hidden sizes with an odd number of blocks and with a last block that is half full, and another head size.
KINDS: dict[str, dict[str, Any]] = {
    "w8a8-96": {"recipe": "w8a8", "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6},
    "w8a8-112": {"recipe": "w8a8", "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1},
    "int4-96": {"recipe": "int4", "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6},
    "int4-112": {"recipe": "int4", "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1},
    "int4-128-160": {"recipe": "int4-128", "hidden_size": 160, "intermediate_size": 384, "num_attention_heads": 10},
    "int4-128-384": {"recipe": "int4-128", "hidden_size": 384, "num_attention_heads": 6},
    "int4-untied-qwen2": {"recipe": "int4", "family": "qwen2", "tie_word_embeddings": False, "head_dim": 32},
    "w8a8-untied-qwen2": {"recipe": "w8a8", "family": "qwen2", "tie_word_embeddings": False, "head_dim": 64},
    "w8a8-int8-cache": {"recipe": "w8a8", "kv": "int8"},
    "int4-int8-cache": {"recipe": "int4", "kv": "int8", "family": "qwen2", "head_dim": 64, "num_attention_heads": 6},
}

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
widths = st.lists(st.integers(1, 33), min_size=1, max_size=5).filter(lambda widths: sum(widths) <= CONTEXT)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def model(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path]) -> Model:
    """A quantized target, padded to two rows as the engine does."""
    kind = dict(request.param)
    kv = kind.pop("kv", None)
    if kv == "int8":
        require_int8_attention()
    return load(tiny_bundle(**kind), kv=kv)


@pytest.fixture(scope="module")
def small(tiny_bundle: Callable[..., Path]) -> Model:
    return load(tiny_bundle(recipe="fp32"))


def load(path: Path, context: int = CONTEXT, exact_rows: bool = True, kv: CacheType | None = None) -> Model:
    bundle = open_bundle(path)
    return Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], context, exact_rows, kv=kv)


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, count)]


def held(model: Model) -> npt.NDArray[Any]:
    """Keys and values of the tokens the cache holds, float32 or int8 [2 * layers, kv_heads, length, head_size]."""
    return np.concatenate([value.numpy()[:, :, : model.cache.length] for value in model.cache._buffers.values()])


def feed(model: Model, tokens: Sequence[int], widths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of all tokens, given in chunks of these widths."""
    chunks, start = [], 0
    for width in widths:
        chunks.append(model.forward(tokens[start : start + width], range(width)).copy())
        start += width
    assert start == len(tokens)
    return np.concatenate(chunks)


def poison(model: Model) -> None:
    """Fill everything the cache does not hold with NaN, or with the number that is furthest off."""
    for value in model.cache._buffers.values():
        rows = value.numpy()
        rows[:, :, model.cache.length :] = -128 if rows.dtype == np.int8 else np.nan


@given(widths=widths, seed=seeds)
@quick
def test_any_chunking_gives_the_same_bits(model: Model, widths: list[int], seed: int) -> None:
    require_bitwise_kernels()
    tokens = random_tokens(seed, sum(widths))
    model.cache.rollback(0)
    logits, cache = feed(model, tokens, [len(tokens)]), held(model)
    model.cache.rollback(0)
    poison(model)
    np.testing.assert_array_equal(feed(model, tokens, widths), logits)
    np.testing.assert_array_equal(held(model), cache)


@given(seed=seeds, count=st.integers(3, 130))
@quick
def test_prefill_and_single_steps_give_the_same_bits(model: Model, seed: int, count: int) -> None:
    require_bitwise_kernels()
    tokens = random_tokens(seed, count)
    model.cache.rollback(0)
    last, cache = model.forward(tokens, [count - 1]).copy(), held(model)
    model.cache.rollback(0)
    model.prefill(tokens[:-2])
    np.testing.assert_array_equal(feed(model, tokens[-2:], [1, 1])[1:], last)
    np.testing.assert_array_equal(held(model), cache)


@given(seed=seeds, rows=st.lists(st.integers(0, 19), max_size=8))
@quick
def test_which_logits_are_wanted_does_not_change_them(model: Model, seed: int, rows: list[int]) -> None:
    require_bitwise_kernels()
    tokens = random_tokens(seed, 20)
    model.cache.rollback(0)
    every = feed(model, tokens, [20])
    model.cache.rollback(0)
    np.testing.assert_array_equal(model.forward(tokens, rows), every[rows])


@given(seed=seeds, kept=st.integers(0, 40), dropped=st.integers(1, 33), width=st.integers(1, 33))
@quick
def test_a_rolled_back_cache_is_as_if_nothing_had_been_drafted(
    model: Model, seed: int, kept: int, dropped: int, width: int
) -> None:
    require_bitwise_kernels()
    tokens, draft = random_tokens(seed, kept + width), random_tokens(seed + 1, dropped)
    model.cache.rollback(0)
    logits, cache = feed(model, tokens, [kept + width])[kept:], held(model)
    model.cache.rollback(0)
    model.prefill(tokens[:kept])
    model.forward(draft, range(dropped))
    model.cache.rollback(kept)
    np.testing.assert_array_equal(held(model), cache[:, :, :kept])
    np.testing.assert_array_equal(feed(model, tokens[kept:], [width]), logits)
    np.testing.assert_array_equal(held(model), cache)


@given(seed=seeds, trunk=st.integers(1, 12), branch=st.integers(1, 12), prefix=st.integers(1, 30))
@quick
def test_the_trunk_of_a_tree_has_the_bits_of_a_chain(
    model: Model, seed: int, trunk: int, branch: int, prefix: int
) -> None:
    require_bitwise_kernels()
    tokens, others = random_tokens(seed, prefix + trunk), random_tokens(seed + 1, branch)
    model.cache.rollback(0)
    chain, cache = feed(model, tokens, [prefix + trunk])[prefix:], held(model)
    model.cache.rollback(0)
    model.prefill(tokens[:prefix])
    # The branch hangs on the trunk's first node.
    mask = np.tri(trunk + branch, dtype=bool)
    mask[trunk:, 1:trunk] = False
    positions = [*range(prefix, prefix + trunk), *range(prefix + 1, prefix + 1 + branch)]
    logits = model.forward([*tokens[prefix:], *others], range(trunk), positions, mask)
    np.testing.assert_array_equal(logits, chain)
    model.cache.rollback(prefix + trunk)
    np.testing.assert_array_equal(held(model), cache)


def test_calls_of_more_shapes_than_are_kept_leave_nothing_of_each_other(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bitwise_kernels()
    monkeypatch.setattr("edge_spec.runtime.host_calls._MOST_SHAPES", 3)
    tokens = random_tokens(8, 12)
    small.cache.rollback(0)
    small.prefill(tokens[:2])
    expected = feed(small, tokens[2:], [10])
    for width in (4, 2, 8, 6, 2, 10, 4, 8):
        for wanted in (width, 1):
            small.cache.rollback(2)
            actual = small.forward(tokens[2 : 2 + width], range(wanted))
            np.testing.assert_array_equal(actual, expected[:wanted])


def test_a_mask_is_gone_with_its_call(small: Model) -> None:
    tokens = random_tokens(9, 12)
    small.cache.rollback(0)
    small.prefill(tokens[:4])
    chain = small.forward(tokens[4:], range(8)).copy()
    # Siblings, that see nothing of each other.
    small.cache.rollback(4)
    siblings = small.forward(tokens[4:], range(8), [4] * 8, np.eye(8, dtype=bool)).copy()
    small.cache.rollback(4)
    np.testing.assert_array_equal(small.forward(tokens[4:], range(8)), chain)
    small.cache.rollback(4)
    mask = np.eye(8, dtype=bool)
    mask[:4, 0] = True
    small.forward(tokens[4:], range(8), [4, 5, 5, 5, 4, 4, 4, 4], mask)
    small.cache.rollback(4)
    np.testing.assert_array_equal(small.forward(tokens[4:], range(8), [4] * 8, np.eye(8, dtype=bool)), siblings)
    assert not np.allclose(siblings[1:], chain[1:])


def test_no_padding_row_can_be_seen(tiny_bundle: Callable[..., Path]) -> None:
    # Without padding a call of one row takes another kernel, so this compares to what floats allow only.
    path = tiny_bundle(recipe="fp32")
    tokens = random_tokens(3, 30)
    plain, padded = load(path, exact_rows=False), load(path)
    start = 0
    for width in (1, 1, 17, 1, 3, 1):
        chunk, start = tokens[start : start + width], start + width
        actual = padded.forward(chunk, [width - 1, 0])
        assert actual.shape == (2, TOKENS)
        np.testing.assert_allclose(actual, plain.forward(chunk, [width - 1, 0]), rtol=0, atol=1e-4)
        assert padded.cache.length == plain.cache.length == start


def test_ids_of_padding_have_no_logits(small: Model) -> None:
    small.cache.rollback(0)
    assert small.forward([1, 2], [0, 1]).shape == (2, TOKENS)


def test_prefill_computes_no_logits_and_any_number_of_chunks(small: Model) -> None:
    small.cache.rollback(0)
    small.prefill([])
    assert small.cache.length == 0
    small.prefill(random_tokens(0, 2 * PREFILL_ROWS + 1))
    assert small.cache.length == 2 * PREFILL_ROWS + 1
    assert small.forward([5], []).shape == (0, TOKENS)


def test_the_last_slot_can_be_used_and_no_more(small: Model) -> None:
    small.cache.rollback(0)
    small.prefill(random_tokens(0, CONTEXT - 1))
    with pytest.raises(RequestError, match=f"2 tokens do not fit: the cache holds {CONTEXT - 1} of {CONTEXT}"):
        small.forward([1, 2], [1])
    assert np.isfinite(small.forward([1], [0])).all()
    with pytest.raises(RequestError, match="do not fit"):
        small.forward([1], [0])
    with pytest.raises(RequestError, match="0 tokens"):
        small.forward([], [])


def test_rolling_back_further_than_the_cache_reaches_is_refused(small: Model) -> None:
    small.cache.rollback(0)
    small.prefill([1, 2, 3])
    for length in (4, -1):
        with pytest.raises(RequestError, match=f"to {length} tokens; it holds 3"):
            small.cache.rollback(length)
    assert small.cache.length == 3


def test_positions_are_refused_where_the_kernel_would_ignore_them(small: Model) -> None:
    small.cache.rollback(0)
    with pytest.raises(RequestError, match="empty cache takes no positions"):
        small.forward([1, 2, 3], [2], positions=[0, 1, 1])


def test_the_buffers_cost_what_the_cache_says(small: Model) -> None:
    slots = CONTEXT + 1  # one for the padding row
    assert small.cache.capacity == slots
    assert small.cache.memory_bytes == 2 * 2 * 2 * slots * 16 * 4  # layers, key and value, heads, slots, floats


@pytest.mark.parametrize("recipe", ["w8a8", "int4"])
def test_a_token_without_any_embedding_stays_finite(tmp_path: Path, recipe: str) -> None:
    # Its rows are all zero, and so is what their quantization is scaled by.
    source = random_model(tie_word_embeddings=False)
    source.model.embed_tokens.weight.data[7] = 0
    checkpoint = save_checkpoint(tmp_path / "checkpoint", source)
    exact, rounded = (
        load(export_pair(checkpoint, None, tmp_path / name, recipe=name, check=False).path).forward(
            [7, 7, 3, 7], [0, 3]
        )
        for name in ("fp32", recipe)
    )
    np.testing.assert_array_equal(exact[0], 0)
    np.testing.assert_array_equal(rounded[0], 0)
    assert np.isfinite(rounded).all() and np.corrcoef(exact[1], rounded[1])[0, 1] > 0.9


def test_the_whole_trained_context_can_be_used(tmp_path: Path) -> None:
    # The padding row of the last token lies behind the positions the model knows.
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model(max_position_embeddings=40))
    model = load(export_pair(checkpoint, None, tmp_path / "bundle", recipe="fp32", check=False).path, context=40)
    tokens = random_tokens(0, 40)
    expected = model.forward(tokens, [39]).copy()
    for width in (1, 17):
        model.cache.rollback(40 - width)
        np.testing.assert_allclose(model.forward(tokens[-width:], [width - 1]), expected, rtol=0, atol=1e-5)


def test_a_graph_that_cannot_be_loaded_is_an_error_of_the_bundle(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model(num_hidden_layers=1))
    path = export_pair(checkpoint, None, tmp_path / "bundle", recipe="fp32", check=False).path
    bundle = open_bundle(path)
    (path / "target" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match="model.onnx is no graph this edge-spec runs"):
        Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 16, exact_rows=True)
