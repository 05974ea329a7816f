"""The coupled rule emits what plain decoding would have emitted, token for token, whatever is proposed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_spec.errors import EdgeSpecError
from edge_spec.runtime.noise import Noise, gumbel, sample_gumbel
from edge_spec.runtime.proposal import Law, Proposal
from edge_spec.runtime.verification import RULES, Verdict, verify_coupled, verify_greedy
from enumeration import KINDS, LawTable, Prefix, law_pair, law_pairs, prefix_of

VOCAB, DEPTH = 3, 3


class Given:
    """Chance that offers Gumbel noise and nothing else."""

    def __init__(self, noise: NDArray[np.float64]) -> None:
        self._noise = noise

    def gumbel(self, depth: int, vocab: int) -> NDArray[np.float64]:
        assert self._noise.shape[1] == vocab
        return self._noise[depth]

    def keep(self, node: int, probability: float) -> bool:
        raise AssertionError("the coupled rule decides nothing by chance")

    def draw(self, weights: Law) -> int:
        raise AssertionError("the coupled rule draws nothing")


def plain_token(law: Law, noise: NDArray[np.float64]) -> int:
    """The same by plain loops."""
    scores = [math.log(share) + extra if share > 0.0 else -math.inf for share, extra in zip(law, noise, strict=True)]
    return scores.index(max(scores))


def plain_text(p: LawTable, noise: NDArray[np.float64], length: int) -> Prefix:
    text: Prefix = ()
    while len(text) < length:
        text = (*text, plain_token(p[text], noise[len(text)]))
    return text


def rows_of(p: LawTable, proposal: Proposal) -> list[Law]:
    parents = proposal.parents or range(-1, len(proposal) - 1)
    return [p[prefix_of(node, proposal.tokens, parents)] for node in range(-1, len(proposal))]


def emitted(proposal: Proposal, verdict: Verdict) -> Prefix:
    return (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Any tree at all, of any tokens, even the same one twice among siblings."""
    size = draw(st.integers(0, 6))
    parents: list[int] = []
    depth = {-1: 0}
    for node in range(size):
        parents.append(draw(st.sampled_from([parent for parent in range(-1, node) if depth[parent] < DEPTH])))
        depth[node] = depth[parents[-1]] + 1
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    return Proposal(tuple(tokens), None, tuple(parents))


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=300, deadline=None)
@given(seed=seeds, proposal=proposals(), kind=st.sampled_from(KINDS))
def test_whatever_is_proposed_the_tokens_are_those_of_plain_decoding(seed: int, proposal: Proposal, kind: str) -> None:
    p, _ = law_pairs(seed, VOCAB, DEPTH, [kind])
    noise = np.random.default_rng(seed).gumbel(size=(DEPTH + 1, VOCAB))
    verdict = verify_coupled(rows_of(p, proposal), proposal, Given(noise))
    tokens = emitted(proposal, verdict)
    assert tokens == plain_text(p, noise, len(tokens))
    ends_at = verdict.path[-1] if verdict.path else -1
    assert not any(
        parent == ends_at and token == verdict.next_token
        for token, parent in zip(proposal.tokens, proposal.parents or (), strict=True)
    ), "the target's token was proposed, and not taken"


def test_every_chain_of_three_and_many_draws_of_noise() -> None:
    p, _ = law_pairs(1, 3, 3, KINDS)
    generator = np.random.default_rng(0)
    accepted = set()
    for noise in generator.gumbel(size=(60, 4, 3)):
        text = plain_text(p, noise, 4)
        for tokens in itertools.product(range(3), repeat=3):
            proposal = Proposal(tokens)
            verdict = verify_coupled(rows_of(p, proposal), proposal, Given(noise))
            common = next((i for i in range(3) if tokens[i] != text[i]), 3)
            assert verdict == Verdict(tuple(range(common)), text[common])
            accepted.add(verdict.accepted)
    assert accepted == {0, 1, 2, 3}


@settings(max_examples=50, deadline=None)
@given(seed=seeds, data=st.data())
def test_a_text_does_not_depend_on_how_it_is_cut_into_rounds(seed: int, data: st.DataObject) -> None:
    """With the production noise, keyed by absolute position, and drafts that are sometimes right."""
    length, start = 6, data.draw(st.integers(0, 10**6))
    p, q = law_pairs(seed, 3, length, ["any", "zeros", "equal"])
    noise = Noise(seed)
    plain = ()
    while len(plain) < length:
        plain = (*plain, verify_coupled([p[plain]], Proposal(), noise.round(start + len(plain))).next_token)
    text: Prefix = ()
    while len(text) < length:
        budget = data.draw(st.integers(0, length - len(text) - 1))
        drafted: Prefix = ()
        for depth in range(budget):
            drafted = (*drafted, sample_gumbel(q[text + drafted], noise.round(start + len(text)).gumbel(depth, 3)))
        rows = [p[text + drafted[:depth]] for depth in range(budget + 1)]
        proposal = Proposal(drafted)
        text += emitted(proposal, verify_coupled(rows, proposal, noise.round(start + len(text))))
    assert text == plain


def test_rows_off_the_accepted_path_are_not_computed() -> None:
    p, _ = law_pairs(5, 3, 3, ["one-hot p"])
    first, read = int(np.argmax(p[()])), []

    class Rows:
        def __getitem__(self, row: int) -> Law:
            read.append(row)
            return p[((first + row) % 3,) if row else ()]

    tree = Proposal(((first + 1) % 3, (first + 2) % 3, first), None, (-1, -1, -1))
    assert verify_coupled(Rows(), tree, Given(np.zeros((2, 3)))).path == (2,)
    assert read == [0, 3]


# Acceptance


def agreement(p: Law, q: Law) -> float:
    """The exact probability that argmax(log p + noise) and argmax(log q + noise) are the same token.

    With exponential races E_w / p_w, token v wins both if E_w / E_v > max(p_w / p_v, q_w / q_v) for all other w.
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[v], q / q[v]).sum() for v in both))


@settings(max_examples=200, deadline=None)
@given(seed=seeds, vocab=st.integers(2, 5), kind=st.sampled_from([kind for kind in KINDS if kind != "tiny"]))
def test_coupled_drafts_agree_at_least_as_often_as_promised(seed: int, vocab: int, kind: str) -> None:
    p, q = law_pair(np.random.default_rng(seed), vocab, kind)
    distance = np.abs(p - q).sum() / 2
    assert agreement(p, q) >= (1 - distance) / (1 + distance) - 1e-12
    assert agreement(p, q) <= 1 - distance + 1e-12  # no coupling does better


@pytest.mark.parametrize("kind", ["any", "equal", "disjoint", "zeros", "near tie"])
def test_drafts_with_the_rounds_noise_agree_as_often_as_computed(kind: str) -> None:
    count = 4000
    p, q = law_pair(np.random.default_rng(3), 4, kind)
    noise = Noise(17)
    kept = 0
    for start in range(count):
        chance = noise.round(start)
        proposal = Proposal((sample_gumbel(q, chance.gumbel(0, 4)),))
        kept += verify_coupled([p, p], proposal, chance).accepted
    exact = agreement(p, q)
    assert abs(kept / count - exact) <= 4 * math.sqrt(exact * (1 - exact) / count) + 1e-6


@pytest.mark.parametrize("kind", ["any", "zeros", "one-hot p", "tiny"])
def test_the_token_with_the_largest_noisy_logarithm_follows_the_law(kind: str) -> None:
    """G-test over the noise of 200,000 positions of a vocabulary of five."""
    count = 200_000
    p, _ = law_pair(np.random.default_rng(11), 5, kind)
    noise = gumbel(5, 0, 5 * count).reshape(count, 5)
    seen = np.bincount([sample_gumbel(p, row) for row in noise[:20_000]], minlength=5)
    with np.errstate(divide="ignore"):
        assert np.array_equal(seen, np.bincount(np.argmax(np.log(p) + noise[:20_000], axis=1), minlength=5))
        seen = np.bincount(np.argmax(np.log(p) + noise, axis=1), minlength=5)
    assert not seen[p == 0].any()
    cells = p * count > 5
    g = 2 * sum(seen[cells] * np.log(np.maximum(seen[cells], 1) / (p[cells] * count)))
    assert g < 25  # chi-square with at most four degrees of freedom: 5e-5


# Temperature 0


@settings(max_examples=200, deadline=None)
@given(seed=seeds, proposal=proposals())
def test_greedy_is_the_coupled_rule_without_noise(seed: int, proposal: Proposal) -> None:
    p, _ = law_pairs(seed, VOCAB, DEPTH, ["any"])
    rows = rows_of(p, proposal)
    logits = np.log(np.stack(rows)).astype(np.float32)
    verdict = verify_greedy(logits, proposal)
    assert verdict == verify_coupled(rows, proposal, Given(np.zeros((DEPTH + 1, VOCAB))))
    tokens = emitted(proposal, verdict)
    assert tokens == tuple(int(np.argmax(p[tokens[:depth]])) for depth in range(len(tokens)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_greedy_keeps_the_common_beginning_and_adds_the_targets_token(own: list[int], data: st.DataObject) -> None:
    proposed = data.draw(st.lists(st.integers(0, 3), min_size=len(own) - 1, max_size=len(own) - 1))
    logits = np.random.default_rng(0).random((len(own), 4)).astype(np.float32)
    logits[np.arange(len(own)), own] = 2.0
    verdict = verify_greedy(logits, Proposal(tuple(proposed)))
    assert proposed[: verdict.accepted] == own[: verdict.accepted]
    assert verdict.next_token == own[verdict.accepted]
    assert verdict.accepted == len(proposed) or proposed[verdict.accepted] != own[verdict.accepted]


def test_greedy_refuses_broken_logits_of_rows_that_the_text_meets() -> None:
    logits = np.array([[0, 1], [np.nan, 1]], np.float32)
    with pytest.raises(EdgeSpecError, match="row 1"):
        verify_greedy(logits, Proposal((1,)))
    assert verify_greedy(logits, Proposal((0,))) == Verdict((), 1)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert verify_greedy(np.array([[0, 2, 2]], np.float32), Proposal()).next_token == 1


def test_the_default_rule_takes_trees_and_shared_noise() -> None:
    assert RULES["coupled"].verify is verify_coupled
    assert RULES["coupled"].trees and [name for name, rule in RULES.items() if rule.coupled] == ["coupled"]


# Proposals


def test_a_proposal_knows_its_trunk_and_the_children_of_every_row() -> None:
    tree = Proposal((5, 6, 7, 8), None, (-1, 0, 0, -1))
    assert (tree.trunk, tree.is_chain, tree.children) == (2, False, [[0, 3], [1, 2], [], [], []])
    for one in (Proposal((5, 6)), Proposal((5, 6), None, (-1, 0))):
        assert (one.trunk, one.is_chain, one.children) == (2, True, [[0], [1], []])
    assert (Proposal().trunk, Proposal().is_chain, Proposal().children) == (0, True, [[]])


@pytest.mark.parametrize("parents", [(-1,), (-1, 1), (0, 0), (-2, 0), (-1, 0, 1)])
def test_parents_that_are_no_tree_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parent"):
        Proposal((3, 4), None, parents)
