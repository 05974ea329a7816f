"""The level of exactness: measured, owed where it is asked for, and reached by a fixed width if need be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Engine
from edge_spec.bundle import open_bundle
from edge_spec.errors import ProviderError, RequestError
from edge_spec.runtime import exactness
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.exactness import FIXED_ROWS, measure_exactness
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.host_calls import HostBuffers, HostCalls
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from row_independence import require_bitwise_kernels, row_dependent_kernels

Bundles = Callable[..., Path]
Array = npt.NDArray[np.float32]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
VOCABULARY = len(LETTERS) + 1
LIMIT = 256  # the context these models are made for
WIDTH = 8

quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def kind(recipe: str, **more: Any) -> dict[str, Any]:
    return {"recipe": recipe, "draft": "close", "letters": LETTERS, "vocab_size": 32, "eos": None, **more}


@pytest.fixture(scope="module")
def path(tiny_bundle: Bundles) -> Path:
    return tiny_bundle(**kind("w8a8"))


def load_model(path: Path, context: int = 160, fixed_rows: int | None = None) -> Model:
    bundle = open_bundle(path)
    return Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], context, True, 1, fixed_rows)


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def depend_on_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every row change by a bit where the session is given more than two, as some kernels do."""
    forward = Model.forward

    def changed(self: Model, token_ids: Sequence[int], *arguments: Any, **options: Any) -> Array:
        logits = forward(self, token_ids, *arguments, **options)
        wide = self.fixed_rows is None and len(token_ids) > 2
        return np.nextafter(logits, np.float32(np.inf)) if wide else logits

    monkeypatch.setattr(Model, "forward", changed)


# Measuring


@pytest.mark.parametrize("recipe", ["w8a8", "int4", "int4-128", "fp32"])
def test_the_engine_promises_what_these_kernels_keep(tiny_bundle: Bundles, recipe: str) -> None:
    with edge_spec.load(tiny_bundle(**kind(recipe))) as engine:
        level = engine.exactness
    if row_dependent_kernels():
        warnings.warn(f"THIS PROCESSOR IS ONLY EXACT IN {level.upper()}: {row_dependent_kernels()}", stacklevel=1)
        assert level in ("bitwise", "distribution")
    elif recipe != "fp32":
        assert level == "bitwise"
    elif level != "bitwise":
        # Its large products are floating point, and nobody promises anything about those.
        pytest.skip("FP32 TARGETS ARE ONLY EXACT IN DISTRIBUTION ON THIS PROCESSOR")


def test_rows_that_depend_on_the_width_are_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depend_on_the_width(monkeypatch)
    model = load_model(path)
    assert measure_exactness(model, VOCABULARY) == "distribution"
    assert model.cache.length == 0
    with edge_spec.load(path) as engine:
        assert engine.exactness == "distribution"
        assert len(engine.generate([1, 2, 3], max_new_tokens=9).token_ids) == 9


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("width", [1, 2, 5])
def test_one_row_of_one_width_is_enough(path: Path, monkeypatch: pytest.MonkeyPatch, row: int, width: int) -> None:
    require_bitwise_kernels()
    forward = Model.forward

    def changed(self: Model, token_ids: Sequence[int], *arguments: Any, **options: Any) -> Array:
        start = self.cache.length - 11
        logits = forward(self, token_ids, *arguments, **options)
        inside = 0 <= row - start < len(token_ids)
        # The last call of a width may be narrower.
        if inside and start % width == 0 and len(token_ids) == min(width, 6 - start) and len(logits):
            logits[row - start, 5] = np.nextafter(logits[row - start, 5], np.float32(0))
        return logits

    monkeypatch.setattr(Model, "forward", changed)
    assert measure_exactness(load_model(path), VOCABULARY) == "distribution"


@pytest.mark.parametrize("context", range(2, 24))
def test_a_context_too_small_for_the_measurement_is_measured_as_far_as_it_reaches(path: Path, context: int) -> None:
    require_bitwise_kernels()
    with edge_spec.load(path, context=context, exactness="bitwise") as engine:
        assert engine.exactness == "bitwise"
        assert engine.context == context
        assert len(engine.generate([1], max_new_tokens=100).token_ids) == context - 1


def test_distribution_is_not_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(target: Model, vocab_size: int) -> str:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(exactness, "measure_exactness", measured)
    with edge_spec.load(path, exactness="distribution") as engine:
        assert engine.exactness == "distribution"
        assert engine.generate([1, 2], max_new_tokens=3).token_ids


@pytest.mark.parametrize("level", ["exact", "", 1, True, ["bitwise"]])
def test_an_unknown_level_is_refused(path: Path, level: Any) -> None:
    with pytest.raises(RequestError, match="exactness is .*, expected 'bitwise', 'distribution' or None"):
        edge_spec.load(path, exactness=level)


# The way to bitwise where kernels depend on the width


@pytest.fixture
def failing_once(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Let the first measurement of a load find that rows depend on the width; the list has the widths measured."""
    widths: list[int | None] = []

    def measured(target: Model, vocab_size: int) -> str:
        widths.append(target.fixed_rows)
        return "distribution" if len(widths) == 1 else measure_exactness(target, vocab_size)

    monkeypatch.setattr(exactness, "measure_exactness", measured)
    return widths


@pytest.fixture
def fixed(path: Path, failing_once: list[int | None]) -> Engine:
    require_bitwise_kernels()
    engine = edge_spec.load(path, exactness="bitwise")
    assert failing_once == [None, FIXED_ROWS]
    return engine


def test_bitwise_falls_back_to_a_fixed_width_and_gives_the_same_text(fixed: Engine, path: Path) -> None:
    assert fixed.exactness == "bitwise"
    with edge_spec.load(path) as usual:
        for seed, prompt in enumerate(([1], [3, 9, 4] * 3, random_tokens(0, 8), random_tokens(1, 100))):
            for options in ({}, {"temperature": 0.9, "seed": seed, "repetition_penalty": 1.1}):
                plain = usual.generate(prompt, speculation="off", max_new_tokens=40, **options)
                for speculation, max_draft in (("off", 0), ("lookup", 4), ("model", 3), ("model", 7), ("model", 12)):
                    drafted = fixed.generate(
                        prompt, speculation=speculation, max_draft=max_draft, max_new_tokens=40, **options
                    )
                    # This machine's kernels are bitwise at any width, so both ways give the same bits here.
                    assert drafted.token_ids == plain.token_ids


def test_every_call_has_the_fixed_width(fixed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = set()
    call = HostCalls.call

    def watched(self: HostCalls, session: GraphSession, shape: CallShape, cache: KVCache) -> HostBuffers:
        if self is fixed._target._calls:
            widths.add((shape.rows, shape.logit_rows))
        return call(self, session, shape, cache)

    monkeypatch.setattr(HostCalls, "call", watched)
    for max_draft in (0, 3, 12):
        fixed.generate(random_tokens(2, 70), max_new_tokens=20, speculation="model", max_draft=max_draft)
    assert widths == {(FIXED_ROWS, FIXED_ROWS), (FIXED_ROWS, 0)}


def test_a_fixed_width_costs_the_end_of_the_longest_context_only(
    path: Path, failing_once: list[int | None], fixed: Engine
) -> None:
    # Padding rows need positions the model knows.
    assert fixed.context == LIMIT + 1 - FIXED_ROWS
    completion = fixed.generate([1, 2, 3], max_new_tokens=1000)
    assert len(completion.token_ids) == fixed.context - 3
    with pytest.raises(RequestError, match=f"leaves no room in the context of {fixed.context}"):
        fixed.generate([1] * fixed.context)
    failing_once.clear()
    with edge_spec.load(path, context=40, exactness="bitwise") as shorter:
        assert failing_once == [None, FIXED_ROWS]
        assert shorter.context == 40


def test_bitwise_is_refused_where_no_width_gives_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "measure_exactness", lambda target, vocab_size: "distribution")
    reason = (
        "exactness='bitwise' cannot hold on this device: a row's logits depend .* Load with exactness='distribution'"
    )
    with pytest.raises(ProviderError, match=reason):
        edge_spec.load(path, exactness="bitwise")
    with edge_spec.load(path) as engine:
        assert engine.exactness == "distribution"
        assert engine._target.fixed_rows is None


def test_a_model_that_depends_on_the_width_becomes_exact_at_a_fixed_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bitwise_kernels()
    depend_on_the_width(monkeypatch)
    with edge_spec.load(path, exactness="bitwise") as engine:
        assert engine.exactness == "bitwise"
        assert engine._target.fixed_rows == FIXED_ROWS


# A model of fixed width


@pytest.fixture(scope="module")
def narrow(path: Path) -> Model:
    return load_model(path, fixed_rows=WIDTH)


def feed(model: Model, tokens: Sequence[int], widths: Sequence[int]) -> Array:
    model.cache.rollback(0)
    chunks, start = [], 0
    for width in widths:
        chunks.append(model.forward(tokens[start : start + width], range(width)).copy())
        start += width
    assert model.cache.length == len(tokens)
    return np.concatenate(chunks)


@given(widths=st.lists(st.integers(1, 33), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
@quick
def test_any_chunking_gives_the_same_logits_at_fixed_width(
    narrow: Model, path: Path, widths: list[int], seed: int
) -> None:
    require_bitwise_kernels()
    tokens = random_tokens(seed, sum(widths))
    np.testing.assert_array_equal(feed(narrow, tokens, widths), feed(narrow, tokens, [len(tokens)]))


@given(rows=st.lists(st.integers(0, 29), max_size=12), seed=st.integers(0, 2**32 - 1))
@quick
def test_logits_of_a_split_call_come_in_the_order_asked_for(narrow: Model, rows: list[int], seed: int) -> None:
    require_bitwise_kernels()
    tokens = random_tokens(seed, 30)
    every = feed(narrow, tokens, [30])
    narrow.cache.rollback(0)
    np.testing.assert_array_equal(narrow.forward(tokens, rows), every[rows])


def test_a_fixed_width_gives_the_logits_of_any_width(narrow: Model, path: Path) -> None:
    tokens = random_tokens(4, 75)
    np.testing.assert_allclose(feed(narrow, tokens, [75]), feed(load_model(path), tokens, [75]), rtol=0, atol=1e-4)


def test_the_context_can_be_filled_at_fixed_width(path: Path) -> None:
    for context in (2, 5, WIDTH, 2 * WIDTH, 21, LIMIT + 1 - WIDTH):
        model = load_model(path, context=context, fixed_rows=WIDTH)
        tokens = random_tokens(context, context)
        model.prefill(tokens[:-1])
        last = model.forward(tokens[-1:], [0])
        assert np.isfinite(last).all()
        np.testing.assert_allclose(last[0], feed(load_model(path, LIMIT), tokens, [context])[-1], rtol=0, atol=1e-4)
        with pytest.raises(RequestError, match=f"1 tokens do not fit: the cache holds {context} of {context}"):
            model.forward([1], [0])
        assert model.cache.length == context


def test_a_call_that_does_not_fit_leaves_the_cache_alone(narrow: Model) -> None:
    feed(narrow, random_tokens(0, 150), [150])
    with pytest.raises(RequestError, match="11 tokens do not fit"):
        narrow.forward(random_tokens(1, 11), [0])
    assert narrow.cache.length == 150


def test_trees_at_fixed_width_have_its_rows_at_most(narrow: Model) -> None:
    feed(narrow, random_tokens(0, 4), [4])
    mask = np.tri(3, dtype=bool)
    assert narrow.forward([1, 2, 3], [2], [4, 5, 5], mask).shape == (1, VOCABULARY)
    with pytest.raises(RequestError, match="masked call has at most 8 rows at fixed width; 9 were given"):
        narrow.forward([1] * 9, [0], range(7, 16), np.tri(9, dtype=bool))
