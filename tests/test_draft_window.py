"""The draft model's cache: what it holds while it slides, shrinks, goes and comes back; and that no text shows it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import RequestError
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_text import ReadText
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from row_independence import require_bitwise_kernels
from stub_model import StubModel, context_of, rounds_of
from test_reference_decoder import hash_of_prefix
from tiny_models import TOKENS

logits_of = hash_of_prefix()
letters = st.integers(0, 2)
GREEDY = SamplingParams()
SINKS = 4


def drafter_of(model: Any, **options: Any) -> ModelDrafter:
    return ModelDrafter(model, **options)


def propose(drafter: ModelDrafter, text: Sequence[int], count: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    return drafter.propose(context_of(text, GREEDY), Budget(count), prefix).tokens


class Bookkeeping(RuleBasedStateMachine):
    """Whatever happens to the text and to the cache, slots hold what lies at their position in what was read."""

    @initialize(
        window=st.integers(2, 24),
        positions=st.integers(24, 80),
        slides=st.booleans(),
        chains=st.sampled_from([(), (2, 4)]),
        text=st.lists(letters, min_size=1),
    )
    def begin(self, window: int, positions: int, slides: bool, chains: tuple[int, ...], text: list[int]) -> None:
        def load() -> Any:
            self.model = StubModel(lambda tokens: logits_of(tokens)[:3], 24, positions, slides, chains)
            return self.model

        def told(rows: int, past: int, seconds: float, drafted: int = 1) -> None:
            self.calls.append((rows, past))
            self.calls += [(1, past + rows + step) for step in range(drafted - 1)]

        self.calls: list[tuple[int, int]] = []
        self.drafter = ModelDrafter(load(), window, told, load=load)
        self.window = window
        self.text = text
        self.drafted: list[int] = []
        self.known: list[int] = []  # a text and draft tokens behind it: all that the model can have read
        self.first = 0  # where in it the model began

    @rule(count=st.integers(1, 12), prefix=st.lists(letters, max_size=3))
    def draft(self, count: int, prefix: list[int]) -> None:
        context, cache = context_of(self.text, GREEDY), self.model.cache
        unread, cached = self.drafter.unread(context, prefix), self.drafter.cached(context, prefix)
        self.calls.clear()
        self.drafted = [*prefix, *self.drafter.propose(context, Budget(count), prefix).tokens]
        if not self.drafter.ready:
            assert self.drafted == prefix and not self.calls
            return
        chain = self.drafted[len(prefix) :]
        assert 1 <= len(chain) <= count
        assert len(chain) == count or cache.length == self.window or cache.positions[-1] + 1 == self.model.positions
        self.known = [*self.text, *self.drafted[:-1]]
        self.first = len(self.known) - 1 - cache.positions[-1]
        # It was said beforehand what had to be read, and how much the cache would hold then.
        assert sum(rows for rows, _ in self.calls) == unread + len(chain) - 1
        assert unread <= 32
        caught_up = self.calls[-len(chain)]
        assert sum(caught_up) == cached
        # What answers is what the cache holds.
        assert chain[-1] == int(np.argmax(logits_of(cache.tokens)[:3]))

    @rule(accepted=st.integers(0, 12), token=letters)
    def grow(self, accepted: int, token: int) -> None:
        self.text += [*self.drafted[:accepted], token]
        self.drafted = []

    @rule(data=st.data(), token=letters)
    def take_back(self, data: st.DataObject, token: int) -> None:
        length = data.draw(st.integers(0, len(self.text)))
        self.roll_back(length)
        self.text = self.text[:length] or [token]

    @rule(text=st.lists(letters, min_size=1, max_size=60))
    def begin_another_text(self, text: list[int]) -> None:
        common = next((i for i, (old, new) in enumerate(zip(self.text, text, strict=False)) if old != new), 0)
        self.roll_back(common)
        self.text = text

    @rule(window=st.integers(2, 24))
    def narrow(self, window: int) -> None:
        self.window = window
        self.drafter.narrow(window)
        if self.drafter.ready:
            assert self.model.cache.capacity <= window

    @rule()
    def unload(self) -> None:
        self.drafter.unload()
        assert self.drafter.memory_bytes == 0

    @precondition(lambda self: not self.drafter.ready)
    @rule()
    def reload(self) -> None:
        self.drafter.reload()
        assert self.model.cache.length == 0

    @invariant()
    def slots_hold_what_was_read(self) -> None:
        if not self.drafter.ready:
            return
        cache = self.model.cache
        assert cache.length <= self.window and cache.length <= self.model.context
        assert cache.tokens == [self.known[self.first + position] for position in cache.positions]
        # No position is missing but in the middle, and what is before that are sinks.
        gaps = [
            slot
            for slot, (position, after) in enumerate(zip([-1, *cache.positions], cache.positions, strict=False))
            if after != position + 1
        ]
        assert len(gaps) <= 1 and all(slot <= SINKS for slot in gaps)
        assert not gaps or self.model.slides

    def roll_back(self, length: int) -> None:
        self.drafter.rollback(length)
        self.known = self.known[:length]
        self.drafted = []


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("window", [8, 64, 100])
def test_a_full_cache_slides_without_reading_anything_again(window: int) -> None:
    rows: list[int] = []
    model = StubModel(logits_of)
    drafter = drafter_of(model, window=window, on_call=lambda count, past, seconds: rows.append(count))
    text = [1]
    while len(text) < 500:
        text += propose(drafter, text, 5)
        sinks = min(SINKS, window * 3 // 4 // 2, model.cache.length)
        assert model.cache.positions[:sinks] == list(range(sinks))
    assert sum(rows) == len(text) - 1  # the last token has not been read yet


def test_sinks_lost_to_a_narrow_window_are_not_replaced_when_it_widens() -> None:
    model = StubModel(logits_of)
    drafter = drafter_of(model, window=24)
    text = [1]
    for window in (24, 4, 24):
        drafter.narrow(window)
        start = len(text)
        while len(text) < start + 60:
            text += propose(drafter, text, 5)
    # A window of 4 keeps 3 tokens, one of them the first.
    assert model.cache.positions[0] == 0
    recent = model.cache.positions[1:]
    assert recent == list(range(recent[0], len(text) - 1)) and recent[0] > 100
    assert model.cache.tokens == [text[position] for position in model.cache.positions]


def test_without_positions_a_full_cache_begins_again() -> None:
    model = StubModel(logits_of, slides=False)
    drafter = drafter_of(model, window=40)
    text = [1]
    lengths = []
    while len(text) < 200:
        text += propose(drafter, text, 5)
        lengths.append(model.cache.length)
    assert max(lengths) == 40
    assert lengths != sorted(lengths)


def test_beyond_the_last_position_the_model_begins_again() -> None:
    model = StubModel(logits_of, context=30, positions=50)
    drafter = drafter_of(model)
    text = [1]
    furthest = []
    while len(text) < 300:
        text += propose(drafter, text, 5)  # the stub refuses positions beyond its last
        furthest.append(model.cache.positions[-1])
    assert max(furthest) == 49 and furthest != sorted(furthest)


def test_a_text_whose_recent_end_is_gone_is_read_again_from_where_it_can_be() -> None:
    model = StubModel(logits_of)
    drafter = drafter_of(model, window=16)
    text = [1]
    while len(text) < 50:
        text += propose(drafter, text, 5)
    drafter.rollback(20)  # into the gap
    assert model.cache.positions == [0, 1, 2, 3]
    propose(drafter, text[:16], 1)
    assert model.cache.tokens == text[:16]


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StubModel(logits_of)
    drafter = drafter_of(model)
    text = [1, 2, 3]
    text += propose(drafter, text, 4)

    def fail(*arguments: Any) -> Any:
        model.cache.length = 0
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        with pytest.raises(MemoryError):
            propose(drafter, text, 4)
    assert propose(drafter, text, 4) == propose(drafter_of(StubModel(logits_of)), text, 4)


@pytest.mark.parametrize("window", [1, 0, -3])
def test_a_window_too_small_is_refused(window: int) -> None:
    with pytest.raises(RequestError, match=f"window is {window} tokens, expected at least 2"):
        ModelDrafter(StubModel(logits_of), window)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"window is {window} tokens, expected at least 2"):
        drafter_of(StubModel(logits_of)).narrow(window)


def test_a_model_that_nobody_can_load_again_stays_away() -> None:
    drafter = drafter_of(StubModel(logits_of))
    drafter.reload()  # is there
    drafter.unload()
    with pytest.raises(RequestError, match="cannot come back"):
        drafter.reload()
    assert not drafter.ready


# Through the loop: no window shows in the text.


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(letters, min_size=1, max_size=30),
    window=st.integers(2, 40),
    slides=st.booleans(),
    chains=st.sampled_from([(), (2, 4)]),
    temperature=st.sampled_from([0.0, 0.9]),
    max_draft=st.integers(1, 8),
    branches=st.booleans(),
)
def test_the_text_is_the_same_with_any_window(
    prompt: list[int],
    window: int,
    slides: bool,
    chains: tuple[int, ...],
    temperature: float,
    max_draft: int,
    branches: bool,
) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    plain, drafted = context_of(prompt, params), context_of(prompt, params)
    list(rounds_of(StubModel(logits_of), None, plain, 90))
    drafter = drafter_of(StubModel(logits_of, slides=slides, chains=chains), window=window)
    rounds = list(rounds_of(StubModel(logits_of), drafter, drafted, 90, max_draft, branches=branches))
    assert drafted.tokens == plain.tokens
    assert sum(round_.drafted for round_ in rounds) > 0


# On real graphs.


@pytest.fixture(scope="module")
def pair(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle(recipe="fp32", draft="close")


def load_draft(path: Path, context: int = 160) -> Model:
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    return Model(bundle, bundle.manifest.draft, ["CPUExecutionProvider"], context, exact_rows=False)


@given(seed=st.integers(0, 2**32 - 1), window=st.integers(8, 40), width=st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_behind_a_gap_the_logits_are_those_of_a_text_whose_dropped_tokens_are_masked(
    pair: Path, seed: int, window: int, width: int
) -> None:
    """Every token sees what the cache held when it was read. The reference reads all of them in one masked call."""
    text = [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, 60)]
    model, reference = load_draft(pair), load_draft(pair)
    read = ReadText(model, window)
    seen = np.zeros((len(text), len(text)), bool)
    held: list[int] = []  # positions in the cache, by the rule that the documentation states
    logits = []
    for start in range(0, len(text), width):
        block = list(range(start, min(start + width, len(text))))
        context = context_of(text[: block[-1] + 1], GREEDY)
        pending = read.catch_up(context.tokens)
        logits.append(read.step(pending)[0].copy())
        if len(held) + len(block) > window:
            kept = min(window * 3 // 4, window - len(block))
            sinks = min(SINKS, kept // 2, *([gap] if (gap := first_gap(held)) else []))
            held = [*held[:sinks], *held[len(held) - (kept - sinks) :]]
        for position in block:
            held.append(position)
            seen[position, held] = True
    assert read.cached == len(held)
    assert len(held) < len(text)
    reference.prefill(text[:1])
    wanted = [min(start + width, len(text)) - 2 for start in range(0, len(text), width)]
    if wanted[0] < 0:
        wanted, logits = wanted[1:], logits[1:]
    expected = reference.forward(text[1:], wanted, range(1, len(text)), seen[1:, 1:])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-4)
    # Without the mask they would be others.
    unmasked = load_draft(pair).forward(text, [row + 1 for row in wanted])
    assert np.abs(unmasked[-1] - expected[-1]).max() > 1e-2


def first_gap(positions: Sequence[int]) -> int | None:
    return next((slot for slot, position in enumerate(positions) if position != slot), None)


@pytest.mark.parametrize("options", [{"speculation": "model", "max_draft": 4}, {"speculation": "model"}, {}])
def test_an_engine_says_the_same_whatever_becomes_of_its_draft(pair: Path, options: dict[str, Any]) -> None:
    require_bitwise_kernels()
    with edge_spec.load(pair, threads=1, context=200) as engine:
        drafter: Any = engine._drafters["model"]
        prompt = [5, 9, 2, 7] * 8
        plain = engine.generate(prompt, max_new_tokens=120, speculation="off").token_ids
        assert engine.generate(prompt, max_new_tokens=120, **options).token_ids == plain
        for window in (100, 40, 16, 2):
            drafter.narrow(window)
            completion = engine.generate(prompt, max_new_tokens=120, **options)
            assert completion.token_ids == plain
        drafter._load = lambda: load_draft(pair, 200)
        drafter.narrow(64)
        for position, chunk in enumerate(engine.stream(prompt, max_new_tokens=120, **options)):
            if position == 5:
                drafter.unload()
            if position == 12:
                drafter.reload()
            completion = chunk.completion  # type: ignore[assignment]
        assert completion.token_ids == plain
        drafter.unload()
        away = engine.generate(prompt, max_new_tokens=120, speculation="model")
        assert away.token_ids == plain and away.statistics.drafted == 0


def test_narrowing_and_unloading_give_memory_back(pair: Path) -> None:
    model = load_draft(pair, 256)
    drafter = ModelDrafter(model, load=lambda: load_draft(pair, 256))
    text = [7]
    while len(text) < 200:
        text += propose(drafter, text, 8)
    held = model.cache.memory_bytes
    assert drafter.memory_bytes == held > 0
    there = weakref.ref(model)
    del model
    drafter.narrow(16)
    assert drafter.memory_bytes <= held
    assert propose(drafter, text, 3)
    drafter.unload()
    gc.collect()
    assert there() is None
    assert drafter.memory_bytes == 0 and propose(drafter, text, 3) == ()
    drafter.reload()
    assert drafter.ready and propose(drafter, text, 3)
