"""Prompt lookup against a naive search, through growth, rollback and change of text."""

from __future__ import annotations

import gc
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.protocol import Budget, Drafter
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams


def context_of(tokens: list[int]) -> Context:
    return Context(tokens, SamplingParams(seed=0))


def naive(tokens: list[int], budget: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """Every earlier position, from the last, for every suffix, from the longest."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tuple(tokens[end : end + max(budget, 0)])
    return ()


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda low: st.tuples(st.integers(low, 5), st.just(low))),
    st.lists(
        st.one_of(
            st.tuples(st.just("emit"), st.lists(st.integers(0, 3), max_size=8)),
            st.tuples(st.just("rollback"), st.integers(0, 30)),
            st.tuples(st.just("new text"), st.lists(st.integers(0, 3), max_size=20)),
        ),
        max_size=12,
    ),
    st.integers(-1, 6),
)
def test_proposes_what_a_naive_search_finds(
    ngrams: tuple[int, int], steps: list[tuple[str, object]], budget: int
) -> None:
    max_ngram, min_ngram = ngrams
    drafter = LookupDrafter(max_ngram, min_ngram)
    context = context_of([])
    for action, argument in steps:
        if action == "emit":
            context.tokens += argument  # type: ignore[operator]
        elif action == "rollback":
            del context.tokens[argument:]  # type: ignore[misc]
            drafter.rollback(argument)  # type: ignore[arg-type]
        elif action == "new text":
            context = context_of(list(argument))  # type: ignore[call-overload]
            drafter.rollback(0)
        expected = naive(context.tokens, budget, max_ngram, min_ngram)
        proposal = drafter.propose(context, Budget(budget))
        assert proposal.tokens == expected and proposal.q is None and proposal.is_chain
        assert drafter.propose(context, Budget(budget)) == proposal  # asking changes nothing


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 60))
def test_rollback_leaves_the_index_as_if_the_rest_had_never_been_there(tokens: list[int], length: int) -> None:
    drafter, fresh = LookupDrafter(), LookupDrafter()
    context = context_of(list(tokens))
    drafter.propose(context, Budget(4))
    drafter.rollback(length)
    kept = tokens[:length]
    fresh.propose(context_of([*kept, 9]), Budget(4))  # the last token is not indexed
    drafter.propose(context_of([*kept, 9]), Budget(4))
    assert (drafter._last_end, drafter._tokens, drafter._overwritten, drafter._key_bytes) == (
        fresh._last_end,
        fresh._tokens,
        fresh._overwritten,
        fresh._key_bytes,
    )


def test_the_longest_suffix_counts_then_the_most_recent_occurrence() -> None:
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3, 6, 4, 3, 5, 1, 2, 3]
    assert LookupDrafter(3, 1).propose(context_of(tokens), Budget(2)).tokens == (6, 4)
    assert LookupDrafter(1, 1).propose(context_of(tokens), Budget(2)).tokens == (5, 1)
    assert LookupDrafter(4, 4).propose(context_of(tokens), Budget(2)).tokens == ()


def test_a_repetition_may_overlap_its_own_suffix_but_never_is_it() -> None:
    assert LookupDrafter(3, 1).propose(context_of([5, 5, 5, 5]), Budget(8)).tokens == (5,)
    assert LookupDrafter(3, 1).propose(context_of([1, 2, 1, 2, 1, 2]), Budget(8)).tokens == (1, 2)
    assert LookupDrafter(3, 1).propose(context_of([1, 2, 3]), Budget(8)).tokens == ()
    assert LookupDrafter(3, 1).propose(context_of([1]), Budget(8)).tokens == ()


def test_a_prefix_is_continued_without_becoming_part_of_the_text() -> None:
    drafter = LookupDrafter(3, 2)
    context = context_of([1, 2, 3, 4, 5, 9, 2])
    assert drafter.propose(context, Budget(4)).tokens == ()
    assert drafter.propose(context, Budget(2), (3,)).tokens == (4, 5)
    assert drafter.propose(context, Budget(8), (7, 3, 4)).tokens == (5, 9, 2)
    assert drafter.propose(context, Budget(2), (7, 8)).tokens == ()
    context.tokens += [7]
    assert drafter.propose(context, Budget(2)).tokens == ()  # nothing above was remembered


def test_a_token_is_vouched_for_by_the_length_of_the_match_and_its_place() -> None:
    proposal = LookupDrafter(3, 1).propose(context_of([1, 2, 3, 4, 5, 6, 7, 8, 0, 2, 3]), Budget(5))
    assert proposal.tokens == (4, 5, 6, 7, 8)
    assert proposal.evidence == tuple(("lookup", 2, place) for place in (0, 1, 2, 3, 3))


def test_another_text_with_the_same_ending_is_not_taken_for_the_old_one() -> None:
    drafter = LookupDrafter(min_ngram=1)
    assert drafter.propose(context_of([7, 1, 4, 5, 6, 7]), Budget(2)).tokens == (1, 4)
    drafter.rollback(0)
    assert drafter.propose(context_of([8, 2, 4, 5, 6, 7]), Budget(2)).tokens == ()
    drafter.rollback(5)
    assert drafter.propose(context_of([8, 2, 4, 5, 6, 8]), Budget(2)).tokens == (2, 4)


def test_a_round_costs_as_much_as_the_tokens_it_added() -> None:
    drafter = LookupDrafter()
    context = context_of(np.random.default_rng(0).integers(0, 5000, 60_000).tolist())
    drafter.propose(context, Budget(8))
    started = time.perf_counter()
    for token in range(1000):
        context.tokens.append(token)
        drafter.propose(context, Budget(8))
        if token % 10 == 9:
            del context.tokens[-5:]
            drafter.rollback(len(context.tokens))
    assert time.perf_counter() - started < 1.0  # 0.01 s; looking through the text every time takes minutes


@pytest.mark.parametrize("vocabulary", [40, 50_000])
def test_memory_is_what_the_index_takes(vocabulary: int) -> None:
    context = context_of(np.random.default_rng(0).integers(0, vocabulary, 20_000).tolist())
    drafter = LookupDrafter()
    gc.collect()
    tracemalloc.start()
    drafter.propose(context, Budget(8))
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * measured < drafter.memory_bytes < 1.25 * measured


def test_it_is_a_drafter_selected_as_lookup() -> None:
    drafter: Drafter = LookupDrafter()
    assert drafter.name == "lookup"
    assert len(Proposal()) == 0 and len(Proposal((1, 2))) == 2


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (3, 0), (2, 3), (-1, 1)])
def test_impossible_ngram_lengths_are_refused(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(RequestError, match=f"min_ngram is {min_ngram} and max_ngram is {max_ngram}, expected 1 <="):
        LookupDrafter(max_ngram, min_ngram)
