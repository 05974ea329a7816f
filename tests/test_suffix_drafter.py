"""Suffix drafting against a search of the whole text, alone and with a table of other texts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.protocol import Budget, Drafter
from edge_spec.runtime.drafters.suffix import SuffixDrafter
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from text_search import longest_suffix, naive_continuations

TREE = True


def context_of(tokens: list[int]) -> Context:
    return Context(tokens, SamplingParams(seed=0))


def propose(tokens: list[int], budget: int, branches: bool = False, prefix: tuple[int, ...] = ()) -> Proposal:
    return SuffixDrafter().propose(context_of(list(tokens)), Budget(budget, branches), prefix)


def naive(text: list[int], budget: int, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The majority's token after the longest earlier suffix, again and again."""
    read = text[len(text) - longest_suffix(text[:-1], text[1:]) :]  # the text itself is no earlier place
    for token in prefix:
        read.append(token)
        read = read[len(read) - longest_suffix(text, read) :]
    drafted: list[int] = []
    while len(drafted) < budget:
        length, tokens, _ = naive_continuations(text, read)
        if not tokens:
            break
        drafted.append(tokens[0])
        read = [*read[len(read) - length :], tokens[0]]
    return tuple(drafted)


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """From the context to every token."""
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("emit"), st.lists(st.integers(0, 3), max_size=8)),
            st.tuples(st.just("rollback"), st.integers(0, 30)),
            st.tuples(st.just("new text"), st.lists(st.integers(0, 3), max_size=16)),
        ),
        max_size=6,
    ),
    st.integers(-1, 6),
    st.lists(st.integers(0, 4), max_size=4),
)
def test_proposes_what_a_naive_search_finds(steps: list[tuple[str, object]], budget: int, prefix: list[int]) -> None:
    drafter, context = SuffixDrafter(), context_of([])
    for action, argument in steps:
        if action == "emit":
            context.tokens += argument  # type: ignore[operator]
            del context.tokens[31:]  # longer texts have suffixes that are not counted
        elif action == "rollback":
            drafter.rollback(argument)  # type: ignore[arg-type]
            del context.tokens[argument:]  # type: ignore[misc]
        else:
            context = context_of(list(argument))  # type: ignore[call-overload]
            drafter.rollback(0)
        proposal = drafter.propose(context, Budget(budget))
        assert proposal.tokens == naive(context.tokens, budget)
        assert proposal.q is None and proposal.is_chain
        extended = drafter.propose(context, Budget(budget), tuple(prefix))
        assert extended.tokens == naive(context.tokens, budget, tuple(prefix))
        assert drafter.propose(context, Budget(budget)) == proposal  # asking changes nothing


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 12))
def test_branches_are_other_continuations_beside_the_same_trunk(text: list[int], budget: int) -> None:
    chain, tree = propose(text, budget), propose(text, budget, TREE)
    assert len(tree) <= budget and len(tree) >= len(chain)
    assert tree.tokens[: tree.trunk] == chain.tokens[: tree.trunk]
    assert tree.evidence is not None and chain.evidence is not None
    assert tree.evidence[: tree.trunk] == chain.evidence[: tree.trunk]
    assert len(set(paths(tree))) == len(tree)
    first, row = [], 0
    while tree.children[row]:
        first.append(tree.children[row][0])
        row = first[-1] + 1
    assert first == list(range(len(first)))  # the likeliest path, wherever other tokens were likelier than more of it
    for row in tree.children:
        assert [tree.evidence[node][-1] for node in row] == list(range(len(row)))
        assert len(row) <= 3


def test_the_majority_comes_first_then_the_most_recent() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1, 2]
    assert propose(text, 1).tokens == (7,)
    tree = propose(text, 3, TREE)
    assert sorted(zip(tree.parents or (), tree.tokens, strict=True)) == [(-1, 7), (-1, 9), (0, 1)]
    assert tree.trunk == 2 and tree.tokens == (7, 1, 9)


def test_a_repetition_is_continued_past_its_own_end() -> None:
    assert propose([1, 2, 3, 1, 2, 3], 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert propose([5, 5], 4).tokens == (5, 5, 5, 5)
    assert propose([1, 2, 3, 1, 2, 3], 8, TREE).is_chain


def test_nothing_is_proposed_for_what_was_never_there() -> None:
    assert len(propose([], 8)) == 0
    assert len(propose([1], 8)) == 0
    assert len(propose([1, 2, 3, 4], 8)) == 0
    assert len(propose([1, 2, 3, 1], 8, prefix=(9,))) == 0
    assert len(propose([1, 1, 1, 1], 0)) == 0


def test_the_evidence_says_how_long_the_match_is_and_how_clear_the_majority() -> None:
    assert propose([1, 2, 3, 1, 2], 3).evidence == (
        ("suffix", 2, 1, 0),
        ("suffix", 3, 1, 0),
        ("suffix", 4, 1, 0),
    )
    assert propose([1, 2, 1, 2, 1], 2).evidence == (("suffix", 3, 1, 0), ("suffix", 4, 1, 0))
    assert propose([1, 7, 1, 7, 2, 1], 1).evidence == (("suffix", 1, 2, 0),)
    assert propose([1, 7, 1, 8, 1], 2, TREE).evidence == (("suffix", 1, 0, 0), ("suffix", 1, 0, 1))
    long = list(range(40))
    proposal = propose(long + long[:1], 39)
    assert [evidence[1] for evidence in proposal.evidence or ()][:17] == [
        *(1, 2, 3, 4, 4, 6, 6, 6, 9, 9, 9, 9, 9, 9, 9, 16, 16)
    ]  # fmt: skip


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_there_are_few_kinds_of_evidence(text: list[int], other: list[int]) -> None:
    table = NgramTable("digest", 10, slot_bits=8)
    table.learn(other)
    proposal = SuffixDrafter(table).propose(context_of(text), Budget(30, TREE))
    for source, length, majority, rank in proposal.evidence or ():
        assert source in ("suffix", "ngram") and length in (1, 2, 3, 4, 6, 9, 16)
        assert majority in (0, 1, 2) and rank in (0, 1, 2)
        assert not rank or (majority == 0 and length in (1, 2))
        assert source == "suffix" or length in (2, 3, 4)


def test_what_one_text_said_is_proposed_in_another() -> None:
    drafter = SuffixDrafter(NgramTable("digest", 100))
    first = context_of([1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        assert drafter.propose(first, Budget(4)) == Proposal(evidence=())
        first.tokens.append(token)
    drafter.rollback(0)
    proposal = drafter.propose(context_of([9, 4, 5]), Budget(8))
    assert proposal.tokens == (6, 7, 8)
    assert proposal.evidence == (("ngram", 2, 1, 0), ("ngram", 3, 1, 0), ("ngram", 4, 1, 0))


def test_the_table_learns_what_is_generated_but_no_prompt() -> None:
    table = NgramTable("digest", 100)
    drafter = SuffixDrafter(table)
    context = context_of([1, 2, 3, 4])
    drafter.propose(context, Budget(4))
    assert table.contexts == 0
    context.tokens += [5, 6]
    drafter.propose(context, Budget(4))
    drafter.propose(context, Budget(4))
    assert table.successors([3, 4]) == (2, [5], [1])
    assert table.successors([2, 3]).context == 0
    context.tokens.append(7)
    drafter.rollback(0)  # another text; the end of this one is learned too
    assert table.successors([5, 6]) == (2, [7], [1])
    drafter.propose(context_of([5, 6, 8]), Budget(4))
    assert table.successors([5, 6]) == (2, [7], [1])


def test_the_table_is_asked_where_the_text_matches_one_token_at_most() -> None:
    table = NgramTable("digest", 100)
    table.learn([1, 2, 3, 7])
    drafter = SuffixDrafter(table)

    def first(tokens: list[int]) -> tuple[int, object]:
        drafter.rollback(0)
        proposal = drafter.propose(context_of(tokens), Budget(1))
        assert proposal.evidence is not None
        return proposal.tokens[0], proposal.evidence[0][:2]

    assert first([3, 5, 1, 2, 3]) == (7, ("ngram", 3))
    assert first([3, 5, 9, 2, 3]) == (7, ("ngram", 2))
    assert first([3, 5, 9, 9, 3]) == (5, ("suffix", 1))
    assert first([1, 2, 3, 5, 1, 2, 3]) == (5, ("suffix", 3))
    assert first([2, 3, 5, 1, 2, 3]) == (5, ("suffix", 2))


def test_the_text_continues_what_the_table_began() -> None:
    table = NgramTable("digest", 100)
    table.learn([3, 4, 5])
    proposal = SuffixDrafter(table).propose(context_of([5, 6, 7, 9, 3, 8, 3, 4]), Budget(4))
    assert proposal.tokens == (5, 6, 7, 9)
    assert [evidence[0] for evidence in proposal.evidence or ()] == ["ngram", "suffix", "suffix", "suffix"]


def test_a_round_costs_as_much_as_the_tokens_it_added() -> None:
    drafter = SuffixDrafter()
    context = context_of(np.random.default_rng(0).integers(0, 5000, 30_000).tolist())
    drafter.propose(context, Budget(8))
    started = time.process_time()
    for token in range(1000):
        context.tokens.append(token)
        drafter.propose(context, Budget(8, TREE))
    assert time.process_time() - started < 2  # 0.05 s; reading the text every time takes a minute


def test_memory_is_that_of_the_automaton_and_the_table() -> None:
    drafter, alone = SuffixDrafter(NgramTable("digest", 100, slot_bits=10)), SuffixDrafter()
    for each in (drafter, alone):
        each.propose(context_of([1, 2, 3] * 100), Budget(1))
    assert drafter.memory_bytes == alone.memory_bytes + NgramTable("digest", 100, slot_bits=10).memory_bytes
    grown = alone.memory_bytes
    alone.rollback(0)
    assert alone.memory_bytes < grown / 10


@pytest.mark.parametrize("branches", [False, TREE])
def test_it_is_a_drafter_selected_as_suffix(branches: bool) -> None:
    drafter: Drafter = SuffixDrafter()
    assert drafter.name == "suffix"
    assert len(drafter.propose(context_of([1, 1]), Budget(8, branches))) > 0
