"""What a head has read: whatever becomes of a text, it says what one says that has just read all of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.head import HeadDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_taps import ReadTaps
from edge_spec.runtime.sampling_params import SamplingParams
from stub_head import Histories, Row, StubHead, TappedModel
from stub_model import StubModel

VOCAB = 5


def said(rows: Sequence[Row]) -> np.ndarray:
    """Logits that any change of any row changes."""
    return np.random.default_rng(zlib.crc32(repr(tuple(rows)).encode())).normal(size=VOCAB).astype(np.float32)


def nothing(history: Sequence[int]) -> np.ndarray:
    return np.zeros(VOCAB, np.float32)


@dataclass
class Scene:
    """A text that a target writes, and a head that reads along."""

    limit: int = 512
    window: int = 1000
    text: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histories = Histories()
        self.target = TappedModel(nothing, self.histories, self.limit)
        self.head = StubHead(said, self.histories)
        self.read = ReadTaps(self.head, self.window, self.target)  # type: ignore[arg-type]

    def write(self, tokens: Sequence[int]) -> None:
        """The text goes on, and the target reads all but its last token."""
        self.text.extend(tokens)
        self.target.prefill(self.text[self.target.cache.length : -1])

    def verify(self, drafted: Sequence[int], kept: int, following: int) -> None:
        """A round: the target reads the pending token and what was drafted, and keeps some of it."""
        length = len(self.text)
        self.target.forward([self.text[-1], *drafted], ())
        self.target.cache.rollback(length + kept)
        self.text += [*drafted[:kept], following]

    def turn(self, length: int) -> None:
        """All behind the first ``length`` tokens is forgotten."""
        del self.text[length:]
        self.target.cache.rollback(min(length, self.target.cache.length))

    def draft(self, prefix: Sequence[int], count: int) -> list[int]:
        """What the head says behind the text and a prefix; compared with a head that has just read it."""
        text = [*self.text, *prefix]
        unread = self.read.unread(text)
        calls = len(self.head.calls)
        pending = self.read.catch_up(text)
        drafted: list[int] = []
        if not pending:
            return drafted
        while len(drafted) < count and self.read.takes(len(pending)):
            logits = self.read.step(pending)
            if not drafted:
                assert unread == sum(told + own for told, own in self.head.calls[calls:])
            whole = [*text, *drafted]
            assert np.allclose(logits, said(self.fresh(whole, len(whole) - 1 - self.read.cache.length)), atol=1e-5)
            drafted.append(int(np.argmax(logits)))
            pending = drafted[-1:]
        return drafted

    def fresh(self, whole: Sequence[int], first: int) -> list[Row]:
        """The rows of a text that is read from some token on."""
        told = len(self.text) - 1
        assert first == 0 or first < told
        return [(tuple(whole[: p + 1]), p >= told, whole[p + 1]) for p in range(first, len(whole) - 1)]


tokens = st.integers(0, VOCAB - 1)
events = st.one_of(
    st.tuples(st.just("round"), st.integers(0, 3), st.integers(1, 4), st.integers(0, 7), tokens),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("pause"), st.lists(tokens, min_size=1, max_size=40)),
    st.tuples(st.just("turn"), st.floats(0, 1), st.lists(tokens, min_size=2, max_size=12)),
    st.tuples(st.just("near turn"), st.integers(0, 6), st.lists(tokens, min_size=1, max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(tokens, min_size=2, max_size=90), st.lists(events, max_size=14), st.sampled_from([12, 60, 512]))
def test_the_head_says_what_one_says_that_reads_the_text_anew(
    prompt: list[int], story: list[tuple[object, ...]], limit: int
) -> None:
    scene = Scene(limit)
    scene.write(prompt)
    for kind, *values in story:
        if kind == "round":
            own, count, kept, following = values
            prefix = [VOCAB - 1] * own
            proposal = [*prefix, *scene.draft(prefix, count)]
            scene.verify(proposal, min(kept, len(proposal)), following)
        elif kind == "ask":
            scene.draft([0] * values[0], values[1])
        elif kind == "pause":
            scene.write(values[0])
        else:
            back = int(values[0] * len(scene.text)) if kind == "turn" else max(1, len(scene.text) - values[0])
            scene.turn(back)
            scene.write([0, *values[1]] if not scene.text else values[1])
        if len(scene.text) > 1:
            scene.draft((), 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 6)), max_size=20))
def test_a_window_holds_however_long_the_text(window: int, rounds: list[tuple[int, int, int]]) -> None:
    scene = Scene(window=window)
    scene.write([1, 2, 3])
    for own, count, kept in rounds:
        prefix = [1] * own
        proposal = [*prefix, *scene.draft(prefix, count)]
        assert scene.read.cache.length <= window
        scene.verify(proposal, min(kept, len(proposal)), 2)


def rows_read(scene: Scene, prefix: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The calls of the head, until it has said what comes next."""
    before = len(scene.head.calls)
    assert scene.draft(prefix, 1)
    return scene.head.calls[before:]


def test_a_round_costs_the_rows_that_it_brought() -> None:
    scene = Scene()
    scene.write([1, 2, 3, 4, 0])
    assert rows_read(scene) == [(4, 0)]
    drafted = scene.draft((), 4)
    scene.verify(drafted, 0, 4)  # nothing was accepted
    assert rows_read(scene) == [(1, 0)]
    drafted = scene.draft((), 4)
    scene.verify(drafted, 3, 4)
    assert rows_read(scene) == [(4, 0)]  # what was accepted is read again, with what the target said of it


def test_what_others_propose_is_read_with_the_heads_own_features() -> None:
    scene = Scene()
    scene.write([1, 2, 3])
    assert rows_read(scene, [4, 0]) == [(2, 0), (0, 1), (0, 1)]
    scene.verify([4, 0, 1], 2, 3)
    assert rows_read(scene) == [(3, 0)]


def test_a_pause_is_caught_up_with_in_wide_calls() -> None:
    scene = Scene()
    scene.write([1, 2, 3])
    scene.draft((), 2)
    scene.write([0] * 100)
    assert rows_read(scene) == [(64, 0), (36, 0)]


def test_after_a_long_pause_the_head_begins_again_with_what_there_is() -> None:
    scene = Scene(limit=20)
    scene.write([1, 2, 3])
    scene.draft((), 2)
    scene.write([0] * 100)
    assert rows_read(scene) == [(20, 0)]


def test_a_turn_whose_end_is_written_otherwise_keeps_what_was_read() -> None:
    scene = Scene()
    scene.write([1] * 50)
    scene.draft((), 3)
    scene.turn(45)
    scene.write([2, 2, 2])
    assert rows_read(scene) == [(3, 0)]  # from the token before the first one that is new
    scene.turn(10)  # its hidden states are gone
    scene.write([3, 3, 3])
    assert rows_read(scene) == [(2, 0)]


def test_a_head_has_nothing_to_say_before_the_target_has() -> None:
    scene = Scene()
    scene.text = [1, 2, 3]
    assert not scene.read.catch_up(scene.text)


def test_texts_that_take_turns_are_kept_apart() -> None:
    histories = Histories()
    target = TappedModel(nothing, histories)
    head = StubHead(said, histories)
    drafter = HeadDrafter(head, target)  # type: ignore[arg-type]
    texts = []
    for start in ([1, 2, 3], [4, 0, 2], [1, 2, 0]):
        target.use(target.new_cache())
        target.prefill(start[:-1])
        texts.append((target.cache, Context(list(start), SamplingParams(temperature=0.0))))
    for number in range(9):
        cache, context = texts[number % 3]
        target.use(cache)
        drafter.switch(context)
        before = len(head.calls)
        proposal = drafter.propose(context, Budget(3))
        assert head.calls[before:] == [(2 if number < 3 else 1, 0), (0, 1), (0, 1)]
        target.prefill([context.tokens[-1]])
        context.tokens.append(1)
        assert len(proposal) == 3


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() -> None:
    histories = Histories()
    target, head = TappedModel(nothing, histories), StubHead(said, histories)
    drafter = HeadDrafter(head, target)  # type: ignore[arg-type]
    first = Context([1] * 30, SamplingParams(temperature=0.0))
    target.prefill(first.tokens[:-1])
    drafter.switch(first)
    drafter.propose(first, Budget(2))
    drafter.rollback(len(first.tokens))
    second = Context([*first.tokens, 2, 3, 4], SamplingParams(temperature=0.0))
    target.prefill(second.tokens[target.cache.length : -1])
    drafter.switch(second)
    assert drafter.unread(second) == 3


def test_readings_end_with_the_targets_caches() -> None:
    histories = Histories()
    target, head = TappedModel(nothing, histories), StubHead(said, histories)
    drafter = HeadDrafter(head, target)  # type: ignore[arg-type]
    for _ in range(3):
        target.use(target.new_cache())
        context = Context([1, 2, 3], SamplingParams(temperature=0.0))
        target.prefill([1, 2])
        drafter.switch(context)
        drafter.propose(context, Budget(2))
    assert drafter.memory_bytes == head.cache.memory_bytes


def test_a_head_that_was_given_up_reads_again_when_it_is_back() -> None:
    histories = Histories()
    target, head = TappedModel(nothing, histories), StubHead(said, histories)
    drafter = HeadDrafter(head, target, load=lambda: StubHead(said, histories))  # type: ignore[arg-type, return-value]
    context = Context([1, 2, 3], SamplingParams(temperature=0.0))
    target.prefill([1, 2])
    said_first = drafter.propose(context, Budget(2))
    drafter.unload()
    assert not drafter.ready and not len(drafter.propose(context, Budget(2)))
    drafter.reload()
    assert drafter.propose(context, Budget(2)) == said_first


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_target_that_tells_nothing_is_no_reason_to_fail(tokens: int) -> None:
    histories = Histories()
    target, head = TappedModel(nothing, histories), StubHead(said, histories)
    drafter = HeadDrafter(head, target)  # type: ignore[arg-type]
    context = Context([1] * tokens, SamplingParams(temperature=0.0))
    StubModel.forward(target, context.tokens[:-1] or [1], ())  # as if hidden states were not kept
    assert not len(drafter.propose(context, Budget(3)))
