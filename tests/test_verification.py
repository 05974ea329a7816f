"""Verification leaves the target's law untouched: every outcome is enumerated, not sampled.

The text of a round, continued by plain decoding, must follow the target's law to rounding. That the measurement would
notice a fault is shown in ``test_verification_faults.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.verification import RULES, Verdict
from edge_spec.runtime.verification import residual as residual_module
from edge_spec.runtime.verification.residual import acceptance_probability, reject, residual
from enumeration import (
    CHAIN_RULES,
    EXACT,
    KINDS,
    TREES,
    Prefix,
    Round,
    chain,
    distance,
    drafts,
    fixed,
    law_pair,
    law_pairs,
    outcomes,
    prefix_of,
    round_law,
)

token, block, traversal = (RULES[name].verify for name in ("token", "block", "traversal"))


def depends_on_the_draws(tokens: Prefix, parents: tuple[int, ...]) -> int | None:
    """A plan that a drafter may have: where it grows, and how far, depends on everything drawn before."""
    if len(tokens) == 4:
        return None
    choice = (sum(tokens) * 5 + len(tokens) * 3) % (len(tokens) + 2) - 1
    if choice == len(tokens):
        return None if tokens else -1
    return choice if len(prefix_of(choice, tokens, parents)) < 3 else -1


def determined(*proposals: Proposal) -> Iterator[tuple[float, Proposal]]:
    return ((1.0 / len(proposals), proposal) for proposal in proposals)


seeds = st.integers(0, 2**32 - 1)
mixtures = st.sampled_from([*((kind,) for kind in KINDS), KINDS, KINDS])


# Exactness


@pytest.mark.parametrize("rule", CHAIN_RULES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, shape=st.sampled_from([(3, 1), (4, 1), (5, 1), (3, 2), (5, 2), (3, 3)]), kinds=mixtures)
def test_drawn_chains_leave_the_law_of_the_text_unchanged(
    rule: str, seed: int, shape: tuple[int, int], kinds: tuple[str, ...]
) -> None:
    vocab, length = shape
    p, q = law_pairs(seed, vocab, length, kinds)
    assert distance(CHAIN_RULES[rule], p, q, chain(length)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_every_relation_of_target_and_draft_at_the_largest_size(rule: str, kind: str) -> None:
    p, q = law_pairs(1, 5, 2, [kind])
    assert distance(CHAIN_RULES[rule], p, q, chain(2)) < EXACT
    p, q = law_pairs(2, 4, 3, [kind])
    assert distance(CHAIN_RULES[rule], p, q, chain(3)) < EXACT


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("tree", TREES)
@settings(max_examples=5, deadline=None)
@given(seed=seeds, kinds=mixtures)
def test_drawn_trees_leave_the_law_of_the_text_unchanged(
    tree: str, replacement: bool, seed: int, kinds: tuple[str, ...]
) -> None:
    p, q = law_pairs(seed, 3, 3, kinds)
    assert distance(traversal, p, q, TREES[tree], replacement) < EXACT


@pytest.mark.parametrize("vocab", [4, 5])
@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_trees_over_larger_vocabularies(vocab: int, replacement: bool) -> None:
    for kinds in (("any",), KINDS):
        p, q = law_pairs(vocab, vocab, 2, kinds)
        for tree in ("three siblings", "fork"):
            assert distance(traversal, p, q, TREES[tree], replacement) < EXACT


@settings(max_examples=20, deadline=None)
@given(seed=seeds, kinds=mixtures, replacement=st.booleans())
def test_where_a_tree_grows_may_depend_on_what_was_drawn_before(
    seed: int, kinds: tuple[str, ...], replacement: bool
) -> None:
    p, q = law_pairs(seed, 3, 4, kinds)
    assert distance(traversal, p, q, depends_on_the_draws, replacement) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, tokens=st.lists(st.integers(0, 2), max_size=3).map(tuple), kinds=mixtures)
def test_determined_chains_leave_the_law_of_the_text_unchanged(
    rule: str, seed: int, tokens: Prefix, kinds: tuple[str, ...]
) -> None:
    p, _ = law_pairs(seed, 3, 3, kinds)
    assert round_law(CHAIN_RULES[rule], p, determined(Proposal(tokens))).distance(p) < EXACT


@settings(max_examples=50, deadline=None)
@given(seed=seeds, data=st.data(), kinds=mixtures)
def test_determined_trees_leave_the_law_of_the_text_unchanged(
    seed: int, data: st.DataObject, kinds: tuple[str, ...]
) -> None:
    """Any tokens, even the same one twice among siblings."""
    size = data.draw(st.integers(1, 5))
    parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
    tokens = tuple(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    p, _ = law_pairs(seed, 3, 5, kinds)
    assert round_law(traversal, p, determined(Proposal(tokens, None, parents))).distance(p) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, kinds=mixtures, last=st.integers(0, 2))
def test_a_chain_may_be_drawn_first_and_determined_later(
    rule: str, seed: int, kinds: tuple[str, ...], last: int
) -> None:
    p, q = law_pairs(seed, 3, 3, kinds)

    def extended() -> Iterator[tuple[float, Proposal]]:
        for chance, drawn in drafts(q, chain(1)):
            yield chance, Proposal((*drawn.tokens, last, drawn.tokens[0]), [q[()]])

    assert round_law(CHAIN_RULES[rule], p, extended()).distance(p) < EXACT


@settings(max_examples=15, deadline=None)
@given(seed=seeds, kinds=mixtures)
def test_drawn_tokens_may_be_called_determined_however_they_were_chosen(seed: int, kinds: tuple[str, ...]) -> None:
    """Without q a rule takes a proposal as it comes: less of it is kept, and not even anticipation can hurt."""
    p, q = law_pairs(seed, 3, 3, kinds)

    def picked() -> Iterator[tuple[float, Proposal]]:
        for chance, drawn in drafts(q, chain(2)):
            yield chance, Proposal(drawn.tokens[: 1 + (drawn.tokens[1] == 0)])

    for verify in CHAIN_RULES.values():
        assert round_law(verify, p, picked()).distance(p) < EXACT


def test_siblings_beyond_the_support_of_their_law_count_as_determined() -> None:
    p, q = law_pairs(3, 3, 1, ["one-hot q"])
    certain = int(np.argmax(q[()]))
    tree = Proposal((certain, (certain + 1) % 3), [q[()]], (-1, -1))
    assert round_law(traversal, p, determined(tree)).distance(p) < EXACT


def test_single_precision_laws_are_kept_to_single_precision() -> None:
    p, q = ({prefix: law.astype(np.float32) for prefix, law in laws.items()} for laws in law_pairs(1, 3, 3, KINDS))
    for verify in CHAIN_RULES.values():
        assert distance(verify, p, q, chain(2)) < 5e-7
    assert distance(traversal, p, q, TREES["depth first"]) < 5e-7
    left, _ = reject(p[()], q[()], 0, 0.7)
    assert left.dtype == np.float32


# How many tokens


@settings(max_examples=40, deadline=None)
@given(seed=seeds, shape=st.sampled_from([(3, 1), (5, 1), (4, 2), (3, 3)]), kinds=mixtures)
def test_block_accepts_at_least_as_many_tokens_as_token_for_every_pair_of_laws(
    seed: int, shape: tuple[int, int], kinds: tuple[str, ...]
) -> None:
    vocab, length = shape
    p, q = law_pairs(seed, vocab, length, kinds)
    by_token, by_block = (round_law(verify, p, drafts(q, chain(length))).accepted for verify in (token, block))
    assert by_block >= by_token - EXACT


def test_block_accepts_more_than_token_where_a_later_token_makes_up_for_an_earlier_one() -> None:
    """The example of Sun et al. 2024, section 2: 10/9 accepted tokens by token, 11/9 by block."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    prefixes = [prefix for length in range(3) for prefix in itertools.product(range(2), repeat=length)]
    laws = dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q)
    accepted = [round_law(verify, laws[0], drafts(laws[1], chain(2))).accepted for verify in (token, block)]
    assert accepted == pytest.approx([10 / 9, 11 / 9], abs=EXACT)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, kinds=mixtures)
def test_one_draft_token_is_kept_as_often_as_any_rule_could(seed: int, kinds: tuple[str, ...]) -> None:
    p, q = law_pairs(seed, 5, 1, kinds)
    for verify in CHAIN_RULES.values():
        kept = round_law(verify, p, drafts(q, chain(1))).accepted
        assert kept == pytest.approx(np.minimum(p[()], q[()]).sum(), abs=EXACT)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, kinds=mixtures, drawn=st.booleans())
def test_on_a_chain_traversal_is_block_decision_by_decision(seed: int, kinds: tuple[str, ...], drawn: bool) -> None:
    p, q = law_pairs(seed, 3, 3, kinds)
    for _, proposal in drafts(q, chain(3)):
        rows = [p[proposal.tokens[:length]] for length in range(4)]
        some = proposal if drawn else Proposal(proposal.tokens)
        assert list(outcomes(traversal, rows, some)) == list(outcomes(block, rows, some))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, kinds=mixtures, replacement=st.booleans())
def test_branches_beside_the_trunk_only_add_tokens(seed: int, kinds: tuple[str, ...], replacement: bool) -> None:
    p, q = law_pairs(seed, 3, 3, kinds)
    trunk = round_law(block, p, drafts(q, chain(2))).accepted
    tree = round_law(traversal, p, drafts(q, fixed(-1, 0, 0, -1), replacement)).accepted
    assert tree >= trunk - EXACT


def test_a_determined_tree_is_kept_as_far_as_the_targets_own_tokens_follow_it() -> None:
    """What descending along tokens drawn from the target gives: each node is kept with its path's probability."""
    p, _ = law_pairs(8, 3, 3, ["any"])
    tree = Proposal((0, 1, 2, 2, 1), None, (-1, 0, 0, -1, 3))
    reach = sum(float(p[()][0] * p[(0,)][t]) for t in (1, 2)) + float(p[()][0] + p[()][2] + p[()][2] * p[(2,)][1])
    assert round_law(traversal, p, determined(tree)).accepted == pytest.approx(reach, abs=EXACT)


# Pieces


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [(0.2, 0.4, 0.5), (0.4, 0.2, 1.0), (0.3, 0.3, 1.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.0), (0.3, 0.0, 1.0)],
)
def test_acceptance_probability(p: float, q: float, expected: float) -> None:
    assert acceptance_probability(p, q) == expected


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_token_the_target_excludes_is_never_kept(rule: str) -> None:
    p = np.array([[0.0, 1.0], [1.0, 0.0]])
    for q in (None, np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])):
        assert list(outcomes(CHAIN_RULES[rule], p, Proposal((0,), q))) == [(1.0, Verdict((), 1))]


def test_the_residual_is_where_the_target_exceeds_the_draft() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    assert residual(p, q, 1).tolist() == [0.25, 0.0, 0.0]
    assert residual(p, None, 0).tolist() == [0.0, 0.25, 0.25]
    assert residual(p, q, 1, 0.75).tolist() == [0.125, 0.0, 0.0]
    assert p.tolist() == [0.5, 0.25, 0.25]


@settings(deadline=None)
@given(seed=seeds, kind=st.sampled_from(KINDS), weight=st.sampled_from([0.0, 1e-300, 0.3, 1.0 - 2.0**-53, 1.0]))
def test_a_rejection_leaves_a_law_and_a_weight(seed: int, kind: str, weight: float) -> None:
    p, q = law_pair(np.random.default_rng(seed), 4, kind)
    for drawn_from in (q, None):
        left, after = reject(p, drawn_from, 0, weight)
        assert 0.0 <= after <= 1.0 and (left >= 0).all() and left.any()


def test_a_rejection_that_only_rounding_explains_leaves_the_targets_law() -> None:
    law = np.array([0.5, 0.5])
    left, after = residual_module.reject(law, law, 0, 1.0)
    assert left.tolist() == [0.5, 0.5] and after == 1.0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_for_chains_refuse_trees(rule: str) -> None:
    tree = Proposal((0, 1), None, (-1, -1))
    with pytest.raises(ValueError, match=f"the {rule} rule verifies chains"):
        RULES[rule].verify(np.full((3, 2), 0.5), tree, None)  # type: ignore[arg-type]
    assert [name for name, rule in RULES.items() if rule.trees] == ["coupled", "traversal"]


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_nothing_proposed_is_plain_sampling(rule: str) -> None:
    p = np.array([[0.25, 0.75, 0.0]])
    assert sorted(outcomes(CHAIN_RULES[rule], p, Proposal()), key=lambda outcome: outcome[0]) == [
        (0.25, Verdict((), 0)),
        (0.75, Verdict((), 1)),
    ]


def test_the_empty_measurement_is_exact() -> None:
    p, _ = law_pairs(1, 3, 1, ["any"])
    law = Round({(0,): 1.0})
    assert law.distance(p) == pytest.approx(1.0 - p[()][0])
