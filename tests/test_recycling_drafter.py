"""Token recycling: what is learned from logits, and the trees that grow from it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
from edge_spec.runtime.drafters.recycling import RecyclingDrafter, likeliest
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams

VOCAB = 50


def context_of(tokens: Sequence[int]) -> Context:
    return Context(list(tokens), SamplingParams())


def law(*likely: tuple[int, float]) -> np.ndarray:
    """Logits of a row where these tokens have these probabilities, and the others share what is left."""
    left = 1.0 - sum(probability for _, probability in likely)
    row = np.full(VOCAB, left / (VOCAB - len(likely)))
    for token, probability in likely:
        row[token] = probability
    return np.log(row).astype(np.float32)


def teach(
    drafter: RecyclingDrafter, last: int, *rows: np.ndarray, chain: Sequence[int] = (), next_token: int = 0
) -> None:
    """A round in which all of the chain was accepted."""
    path = tuple(range(len(chain)))
    drafter.observe(Outcome(last, Proposal(tuple(chain)), path, next_token, np.stack(rows)))


def tree(drafter: RecyclingDrafter, tokens: Sequence[int], most: int = 8) -> Proposal:
    return drafter.propose(context_of(tokens), Budget(most, branches=True))


def test_what_the_target_thought_likely_is_proposed_the_next_time() -> None:
    drafter = RecyclingDrafter()
    assert tree(drafter, [9, 7]) == Proposal()
    teach(drafter, 7, law((1, 0.6), (2, 0.3)))
    proposal = tree(drafter, [9, 7], most=2)
    assert proposal.tokens == (1, 2)
    assert proposal.parents == (-1, -1)
    assert tree(drafter, [7, 9]) == Proposal()


def test_unseen_tokens_end_a_branch_and_seen_ones_are_continued() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 7, law((1, 0.98)))
    teach(drafter, 1, law((2, 0.98)))
    chain = drafter.propose(context_of([7]), Budget(8))
    assert chain.tokens == (1, 2) and chain.parents is None


def test_the_last_two_tokens_say_more_than_the_last() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 5, law((7, 0.9)), law((1, 0.9)), chain=[7])
    teach(drafter, 6, law((7, 0.9)), law((2, 0.9)), chain=[7])
    assert tree(drafter, [5, 7], 1).tokens == (1,)
    assert tree(drafter, [6, 7], 1).tokens == (2,)
    assert tree(drafter, [8, 7], 1).tokens == (2,)  # seen last
    assert tree(drafter, [7], 1).tokens == (2,)
    by_pair, by_token = tree(drafter, [6, 7], 1).evidence, tree(drafter, [8, 7], 1).evidence
    assert by_pair != by_token


def test_the_first_row_of_a_round_is_known_by_the_end_of_the_round_before() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 5, law((7, 0.9)), next_token=7)
    teach(drafter, 7, law((1, 0.9)))
    teach(drafter, 7, law((2, 0.9)))  # nobody said what came before this 7
    assert tree(drafter, [5, 7], 1).tokens == (1,)
    assert tree(drafter, [8, 7], 1).tokens == (2,)


def test_rejected_tokens_teach_too_but_the_accepted_path_has_the_last_word() -> None:
    drafter = RecyclingDrafter()
    proposal = Proposal((4, 3, 4), parents=(-1, -1, 1))
    rows = np.stack([law((3, 0.9)), law((1, 0.9)), law((4, 0.9)), law((2, 0.9))])
    drafter.observe(Outcome(7, proposal, (1, 2), 0, rows))
    assert tree(drafter, [7, 4], 1).tokens == (1,)  # the rejected 4
    assert tree(drafter, [3, 4], 1).tokens == (2,)
    assert tree(drafter, [9, 4], 1).tokens == (2,)


def test_the_prefix_is_continued_like_text() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 5, law((7, 0.9)), law((1, 0.9)), law((3, 0.9)), chain=[7, 1])
    for text, prefix in (([5, 7], ()), ([5], (7,)), ([9], (5, 7)), ([9], (8, 5, 7))):
        proposal = drafter.propose(context_of(text), Budget(2), prefix)
        assert proposal.tokens == (1, 3)


def test_memory_outlives_rollback_and_the_text() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 7, law((1, 0.9)))
    for length in (1, 0):
        drafter.rollback(length)
        assert tree(drafter, [9, 9, 7], 1).tokens == (1,)


def test_trees_grow_where_the_probability_is_largest() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 9, law((7, 0.9)), law((1, 0.6), (2, 0.35)), law((3, 0.5), (4, 0.45)), chain=[7, 1])
    teach(drafter, 9, law((7, 0.9)), law((1, 0.6), (2, 0.35)), law((5, 0.95)), chain=[7, 2])
    # 1: .6, 2: .35, then 2-5: .33, 1-3: .3, 1-4: .27
    proposal = tree(drafter, [9, 7], 5)
    assert proposal.tokens == (1, 3, 2, 5, 4)
    assert proposal.parents == (-1, 0, -1, 2, 0)
    assert tree(drafter, [9, 7], 3).tokens == (2, 5, 1) or tree(drafter, [9, 7], 3).tokens == (1, 2, 5)
    assert drafter.propose(context_of([9, 7]), Budget(2)).tokens == (1, 3)


def test_what_follows_two_known_tokens_is_trusted_more_than_what_follows_one() -> None:
    drafter = RecyclingDrafter()
    teach(drafter, 8, law((2, 0.9)), law((4, 0.9)), chain=[2])  # says nothing of 7, 2
    teach(drafter, 7, law((1, 0.9)), law((3, 0.9)), chain=[1])
    teach(drafter, 9, law((7, 0.9)), law((2, 0.5), (1, 0.45)), chain=[7])
    assert set(tree(drafter, [9, 7], 3).tokens) == {2, 1, 3}


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 20), st.booleans())
def test_proposals_are_well_formed_within_budget_and_leave_the_text_alone(
    data: st.DataObject, most: int, branches: bool
) -> None:
    drafter = RecyclingDrafter()
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    text = [int(token) for token in generator.integers(0, VOCAB, data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(0, 6))):
        budget = Budget(most, branches)
        proposal = drafter.propose(context_of(text), budget)
        assert proposal == drafter.propose(context_of(text), budget)  # asking changes nothing
        assert len(proposal) <= most
        assert proposal.q is None
        assert all(evidence[0] == "recycling" for evidence in proposal.evidence or ())
        assert len(proposal.evidence or ()) == len(proposal)
        if not branches:
            assert proposal.parents is None
        for children in proposal.children:
            tokens = [proposal.tokens[node] for node in children]
            assert len(set(tokens)) == len(tokens)
        assert all(0 <= token < VOCAB for token in proposal.tokens)
        rows = generator.normal(scale=4.0, size=(len(proposal) + 1, VOCAB)).astype(np.float32)
        next_token = int(rows[0].argmax())
        drafter.observe(Outcome(text[-1], proposal, (), next_token, rows))
        text.append(next_token)


def test_few_evidences_tell_the_likely_from_the_unlikely() -> None:
    seen = set()
    for level in np.linspace(0.01, 0.99, 99):
        drafter = RecyclingDrafter()
        teach(drafter, 9, law((7, 0.9)), law((1, level)), chain=[7])
        for text in ([9, 7], [8, 7]):
            seen |= set(tree(drafter, text, 2).evidence or ())
    assert 10 <= len(seen) <= 30


@pytest.mark.parametrize("vocab", [1, 5, 8, 63, 64, 65, 127, 130, 600, 4096, 49_152, 50_257])
def test_the_likeliest_tokens_are_those_a_full_sort_finds(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    logits = generator.permuted(np.tile(np.linspace(-12, 12, vocab, dtype=np.float32), (4, 1)), axis=1)
    tokens, probabilities = likeliest(logits, 8)
    np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=1)[:, :8])
    assert tokens.shape == probabilities.shape == (4, min(vocab, 8))
    assert (probabilities <= 1.0).all() and (np.diff(probabilities, axis=1) <= 0.0).all()


def test_probabilities_are_close_where_a_few_tokens_have_them() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 49_152)).astype(np.float32)
    logits[:, 1000], logits[:, 40_000] = 14.0, 13.0
    tokens, probabilities = likeliest(logits, 8)
    exact = np.exp(logits - logits.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, np.take_along_axis(exact, tokens, axis=1), rtol=0.1, atol=0.01)


def test_rows_of_a_wider_array_are_read_in_place() -> None:
    wide = np.random.default_rng(0).normal(size=(3, 1100)).astype(np.float32)
    wide[:, 1000:] = 99.0
    tokens, _ = likeliest(wide[:, :1000], 8)
    np.testing.assert_array_equal(tokens, np.argsort(-wide[:, :1000], axis=1)[:, :8])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_rows_that_are_not_finite_teach_nothing(broken: float) -> None:
    drafter = RecyclingDrafter()
    row = law((1, 0.9))
    row[3] = broken
    teach(drafter, 7, row)
    assert tree(drafter, [7]) == Proposal()


def test_tokens_that_are_forbidden_are_not_proposed() -> None:
    drafter = RecyclingDrafter()
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[4, 5]] = 1.0
    teach(drafter, 7, row)
    assert sorted(tree(drafter, [7]).tokens) == [4, 5]


def test_memory_is_fixed_and_below_two_megabytes() -> None:
    tracemalloc.start()
    drafter = RecyclingDrafter()
    size = drafter.memory_bytes
    logits = np.random.default_rng(0).normal(size=(33, 200)).astype(np.float32)
    for start in range(0, 12_800, 32):
        drafter.observe(Outcome(start, Proposal(tuple(range(start, start + 32))), (), 0, logits))
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drafter.memory_bytes == size < 2_000_000
    assert measured < 1.1 * size + logits.nbytes + 50_000


def test_it_is_a_drafter_selected_as_recycling() -> None:
    drafter: Drafter = RecyclingDrafter()
    assert drafter.name == "recycling"
