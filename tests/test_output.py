"""Where a text ends: exactly at the token that ends it, however the tokens are divided into blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.output import Output
from edge_spec.runtime.sampling_params import SamplingParams

LETTERS = "abcdefgh"
EOS, STOP_TOKEN = 8, 3


class Letters:
    """A tokenizer of one letter per token; the end-of-text token has text too, as in careless checkpoints."""

    joins_bytes = True

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{LETTERS}$"[token] for token in ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def is_byte_fallback(self, token_id: int) -> bool:
        return False


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(room: int = 1000, **options: object) -> Output:
    timing = {name: options.pop(name) for name in ("cancelled", "started", "clock") if name in options}
    return Output(Letters(), SamplingParams(**options), [EOS], room, **timing)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [f"{LETTERS}$".index(letter) for letter in text]


def feed(target: Output, blocks: list[list[int]]) -> tuple[str, list[int], list[str]]:
    """Push blocks as the engine does; text and tokens as they came out, and each piece."""
    pieces, emitted = [], []
    for block in blocks:
        if target.finish_reason is not None:
            break
        texts, tokens = target.push(block)
        assert len(texts) == len(tokens)
        pieces.append("".join(texts))
        emitted += tokens
    return "".join(pieces), emitted, pieces


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    tokens = draw(st.lists(st.integers(0, 8), max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=10)))
    return tokens, [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def end_of(tokens: list[int], stop: tuple[str, ...], stop_tokens: list[int], limit: int) -> tuple[int, str, str | None]:
    """How many tokens are emitted, the text, and why it ends; by looking at every prefix."""
    for count in range(len(tokens) + 1):
        text = Letters().decode(tokens[:count])
        if count and tokens[count - 1] in (EOS, *stop_tokens):
            return count, text[:-1], "stop"
        complete = [len(string) for string in stop if text.endswith(string)]
        if complete:
            return count, text[: -max(complete)], "stop"
        if count == limit:
            return count, text, "length"
    return len(tokens), Letters().decode(tokens), None


@settings(max_examples=500, deadline=None)
@given(
    divided(),
    st.lists(st.text("abcdefgh", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(st.integers(0, 7), max_size=2),
    st.integers(0, 25),
    st.integers(1, 25),
)
def test_the_end_is_exact_and_the_same_for_every_division_into_blocks(
    divided_tokens: tuple[list[int], list[list[int]]],
    stop: tuple[str, ...],
    stop_tokens: list[int],
    max_new_tokens: int,
    room: int,
) -> None:
    tokens, blocks = divided_tokens
    limit = min(max_new_tokens, room)
    count, text, reason = end_of(tokens, stop, stop_tokens, limit)
    target = output(room, stop=stop, stop_token_ids=stop_tokens, max_new_tokens=max_new_tokens)
    streamed, emitted, _ = feed(target, blocks)
    assert emitted == target.token_ids == tokens[:count]
    assert target.finish_reason == reason
    assert streamed == target.text
    if reason is not None:
        assert streamed == text
    else:
        assert text.startswith(streamed)  # the rest may be the beginning of a stop string
    assert target.push([0, 1]) == ((), ()) or reason is None


def test_no_part_of_a_stop_string_across_blocks_is_ever_streamed() -> None:
    target = output(stop="cdef")
    _, emitted, pieces = feed(target, [ids("ab"), ids("cd"), ids("e"), ids("fgh")])
    assert pieces == ["ab", "", "", ""]
    assert emitted == ids("abcdef")
    assert (target.text, target.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("token", [EOS, STOP_TOKEN])
def test_an_end_token_inside_a_block_is_the_last_token_and_no_text(token: int) -> None:
    target = output(stop_token_ids=[STOP_TOKEN], stop="bz")
    assert target.push([0, 1, token, 4, 5]) == (("a", "", "b"), (0, 1, token))
    assert target.finish_reason == "stop"


def test_a_withheld_beginning_of_a_stop_string_comes_out_when_the_text_ends_otherwise() -> None:
    target = output(stop="bcz", max_new_tokens=3)
    assert target.push(ids("abcde")) == (("a", "", "bc"), tuple(ids("abc")))
    assert target.finish_reason == "length"


def test_a_stop_string_that_completes_at_the_length_limit_counts_as_a_stop() -> None:
    target = output(stop="bc", max_new_tokens=3)
    assert target.push(ids("abcde")) == (("a", "", ""), tuple(ids("abc")))
    assert target.finish_reason == "stop"


def test_a_stop_string_whose_last_bytes_are_settled_only_by_the_end_counts_as_a_stop() -> None:
    class Bytes(Letters):
        def is_byte_fallback(self, token_id: int) -> bool:
            return token_id == 2  # more bytes could follow

    target = Output(Bytes(), SamplingParams(stop="c", max_new_tokens=2), [EOS], 10)  # type: ignore[arg-type, call-arg]
    assert target.push(ids("ac")) == (("a", ""), tuple(ids("ac")))
    assert target.finish_reason == "stop"


@pytest.mark.parametrize(("max_new_tokens", "room"), [(0, 10), (5, 0)])
def test_no_room_for_a_token_is_an_empty_completion(max_new_tokens: int, room: int) -> None:
    target = output(room, max_new_tokens=max_new_tokens)
    assert target.finish_reason == "length"
    assert target.push(ids("abc")) == ((), ())
    assert (target.text, target.token_ids) == ("", [])


def test_nothing_is_emitted_after_the_deadline() -> None:
    clock = Clock()
    target = output(deadline=2.0, clock=clock, stop="bz")
    assert target.push(ids("ab")) == (("a", ""), tuple(ids("ab")))
    clock.now += 1.999
    assert target.push(ids("cb")) == (("bc", ""), tuple(ids("cb")))
    clock.now += 0.001
    assert target.push(ids("de")) == (("b",), ())  # what was held back comes out
    assert (target.finish_reason, target.text, target.token_ids) == ("deadline", "abcb", ids("abcb"))


def test_the_deadline_counts_from_the_request() -> None:
    clock = Clock()
    target = output(deadline=2.0, clock=clock, started=97.0)
    assert target.poll() == ""
    assert target.finish_reason == "deadline"
    assert target.push(ids("a")) == ((), ())


def test_a_deadline_that_passes_within_a_block_cuts_it_there() -> None:
    clock = Clock()

    def ticking() -> float:
        clock.now += 1.0
        return clock.now

    target = output(deadline=3.5, clock=ticking, started=100.0)
    assert target.push(ids("abcdefgh"))[1] == tuple(ids("abc"))
    assert target.finish_reason == "deadline"


def test_cancellation_ends_the_text_between_tokens_and_between_rounds() -> None:
    answers = iter([False, False, False, True])
    target = output(cancelled=lambda: next(answers))
    assert target.push(ids("ab")) == (("a", "b"), tuple(ids("ab")))
    assert target.push(ids("cd")) == (("c",), tuple(ids("c")))
    assert target.finish_reason == "cancelled"
    assert target.poll() == ""  # not asked again

    withheld = output(cancelled=lambda: bool(withheld.token_ids), stop="bz")
    withheld.push(ids("b"))
    assert withheld.poll() == "b"
    assert (withheld.finish_reason, withheld.text) == ("cancelled", "b")


def test_an_end_within_the_last_token_wins_over_a_cancellation_that_follows_it() -> None:
    target = output(cancelled=lambda: len(target.token_ids) > 0)
    target.push([EOS])
    assert target.finish_reason == "stop"
