"""The suffix automaton against a search of the whole text."""

from __future__ import annotations

import gc
import time
import tracemalloc
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.drafters.suffix_automaton import SuffixAutomaton
from text_search import longest_suffix, naive_continuations

# Few different tokens, so that they repeat, and short enough that every suffix is counted.
texts = st.integers(1, 4).flatmap(lambda tokens: st.lists(st.integers(1, tokens), max_size=31))


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(1, 5), max_size=6))
def test_finds_the_longest_earlier_suffix_and_what_followed_it(text: list[int], query: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length, token in enumerate(text, start=1):
        automaton.extend([token])
        read = text[:length]
        match = automaton.suffix
        assert match.length == longest_suffix(read[:-1], read[1:])
        assert automaton.continuations(match) == naive_continuations(read, read[length - match.length :])
    match, read = automaton.suffix, list(text)
    for token in query:
        match = automaton.advance(match, token)
        read.append(token)
        assert match.length == longest_suffix(text, read[1:])
        assert automaton.continuations(match) == naive_continuations(text, read[len(read) - match.length :])


@settings(deadline=None)
@given(texts, st.integers(-1, 40), texts)
def test_a_truncated_automaton_is_as_if_the_rest_had_never_been_read(
    text: list[int], length: int, more: list[int]
) -> None:
    automaton = SuffixAutomaton(text)
    automaton.truncate(length)
    automaton.extend(more)
    assert vars(automaton) == vars(SuffixAutomaton(text[: max(length, 0)] + more))


def test_asking_changes_nothing() -> None:
    automaton, untouched = SuffixAutomaton([1, 2, 3, 1, 2]), SuffixAutomaton([1, 2, 3, 1, 2])
    match = automaton.advance(automaton.advance(automaton.suffix, 3), 9)
    automaton.continuations(match)
    assert match.length == 0 and vars(automaton) == vars(untouched)


def test_no_text_has_no_suffix_and_nothing_follows_it() -> None:
    automaton = SuffixAutomaton()
    assert automaton.suffix.length == 0 and len(automaton) == 0
    assert automaton.continuations(automaton.suffix) == (0, [], [])
    assert automaton.advance(automaton.suffix, 3).length == 0


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(20_000)),
        [7] * 20_000,
        list(islice(cycle(range(5)), 20_000)),
        np.random.default_rng(0).integers(0, 50, 20_000).tolist(),
    ],
    ids=["all different", "all the same", "periodic", "random"],
)
def test_reading_a_text_costs_the_same_for_every_token(tokens: list[int]) -> None:
    started = time.process_time()
    automaton = SuffixAutomaton(tokens)
    match = automaton.suffix
    for _ in range(1000):
        match = automaton.advance(match, automaton.continuations(match)[1][0]) if match.length else match
    assert time.process_time() - started < 3  # 0.1 s; counting every suffix of 20,000 equal tokens takes 20 s


@pytest.mark.parametrize("vocabulary", [1, 40, 3000, 50_000])
def test_memory_is_what_the_automaton_takes(vocabulary: int) -> None:
    tokens = np.random.default_rng(0).integers(0, vocabulary, 4000).tolist()
    gc.collect()
    tracemalloc.start()
    automaton = SuffixAutomaton(tokens)
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * measured < automaton.memory_bytes < 1.25 * measured
