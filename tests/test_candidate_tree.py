"""Merging proposals and selecting from them, against brute force on small random trees."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.candidate_tree import CandidateTree, Selection
from edge_spec.runtime.proposal import Evidence, Proposal

FREE = [0.0] * 99


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """By token, the path that ends there."""
    paths: list[tuple[int, ...]] = []
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def evidence_by_path(proposal: Proposal) -> dict[tuple[int, ...], Evidence]:
    assert proposal.evidence is not None
    return dict(zip(paths_of(proposal), proposal.evidence, strict=True))


def merged(*several: Proposal) -> CandidateTree:
    tree = CandidateTree()
    for proposal in several:
        tree.add(proposal)
    return tree


def everything(tree: CandidateTree) -> Proposal:
    return tree.select(lambda evidence: 0.9, FREE.__getitem__, most=99).proposal


def chances_of(table: dict[Evidence, float], *several: Proposal) -> dict[tuple[int, ...], float]:
    """By path, the product of acceptances along it, each the best that a proposal has evidence for."""
    best: dict[tuple[int, ...], float] = {}
    for proposal in several:
        for path, evidence in evidence_by_path(proposal).items():
            best[path] = max(best.get(path, 0.0), table[evidence])
    chances = {(): 1.0}
    for path in sorted(best, key=len):
        chances[path] = chances[path[:-1]] * best[path]
    return chances


@st.composite
def proposals(draw: st.DrawFn, most: int = 7) -> Proposal:
    """A chain or a tree without equal siblings, of few tokens, so that several coincide; evidence 0 to 5."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(3) if token not in taken]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
        else:  # continue another token
            break
    evidence = tuple(("some drafter", draw(st.integers(0, 5))) for _ in tokens)
    return Proposal(tuple(tokens), parents=tuple(parents), evidence=evidence)


acceptances = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]), min_size=6, max_size=6).map(
    lambda values: {("some drafter", index): value for index, value in enumerate(values)}
)
costs = st.lists(st.floats(-0.5, 2.0), min_size=15, max_size=15).map(lambda values: [0.0, *values])


@given(st.lists(proposals(), max_size=3))
def test_merging_is_the_union_of_paths_and_the_first_evidence_counts(several: list[Proposal]) -> None:
    tree = CandidateTree()
    expected: dict[tuple[int, ...], Evidence] = {}
    for proposal in several:
        tree.add(proposal)
        expected = {**evidence_by_path(proposal), **expected}
    if expected:
        assert evidence_by_path(everything(tree)) == expected
    assert len(tree) == len(expected)


@given(proposals(), proposals())
def test_adding_what_is_there_changes_nothing(first: Proposal, second: Proposal) -> None:
    tree, again = CandidateTree(), CandidateTree()
    for proposal in (first, second):
        tree.add(proposal)
    for proposal in (first, second, second, first):
        again.add(proposal)
    assert everything(tree) == everything(again)


def test_a_proposal_continues_the_path_it_is_added_at() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2), evidence=(("a",), ("a",))))
    tree.add(Proposal((3, 4), evidence=(("b",), ("b",))), at=(1,))
    assert evidence_by_path(everything(tree)) == {(1,): ("a",), (1, 2): ("a",), (1, 3): ("b",), (1, 3, 4): ("b",)}
    with pytest.raises(ValueError, match=r"no path \(1, 7\); add what leads there first"):
        tree.add(Proposal((3,)), at=(1, 7))


def test_a_proposal_that_gives_no_evidence_is_some_draft() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2)))
    assert everything(tree).evidence == (("draft",), ("draft",))


def test_what_speaks_most_strongly_for_a_token_counts() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2), evidence=(("weak",), ("weak",))))
    tree.add(Proposal((1,), evidence=(("strong",),)))
    selection = tree.select({("weak",): 0.2, ("strong",): 0.9}.__getitem__, FREE.__getitem__, most=9)
    assert selection.accepted == pytest.approx(0.9 + 0.9 * 0.2)
    assert selection.proposal.evidence == (("strong",), ("weak",))


@given(proposals(), proposals(), st.lists(st.integers(0, 2), max_size=5))
def test_every_token_behind_right_ones_is_compared_with_what_the_target_says(
    first: Proposal, second: Proposal, told: list[int]
) -> None:
    tree = merged(first, second)
    expected = {
        (path, evidence, path[-1] == told[len(path) - 1])
        for proposal in (first, second)
        for path, evidence in zip(paths_of(proposal), proposal.evidence or (), strict=True)
        if len(path) <= len(told) and path[:-1] == tuple(told[: len(path) - 1])
    }
    compared = list(tree.compared_with(told))
    assert sorted(compared) == sorted((evidence, right) for _, evidence, right in expected)


@settings(max_examples=300, deadline=None)
@given(proposals(), proposals(), acceptances, costs, st.integers(0, 15))
def test_no_other_tree_gains_more(
    first: Proposal, second: Proposal, table: dict[Evidence, float], cost: list[float], most: int
) -> None:
    tree = merged(first, second)
    chances = chances_of(table, first, second)
    selection = tree.select(table.__getitem__, cost.__getitem__, most)
    paths = paths_of(selection.proposal)
    assert all(path[:-1] in {(), *paths} for path in paths)
    assert len(paths) <= most
    assert selection.accepted == pytest.approx(sum(chances[path] for path in paths))
    assert selection.gain == pytest.approx(selection.accepted - cost[len(paths)])

    # Subsets that leave out parents cannot be verified; that they would not gain more anyway makes the check simple.
    values = [chance for path, chance in chances.items() if path]
    best = max(
        sum(subset) - cost[size] for size in range(min(most, len(values)) + 1) for subset in combinations(values, size)
    )
    assert selection.gain == pytest.approx(best)


@settings(max_examples=300, deadline=None)
@given(proposals(), proposals(), acceptances, costs, st.integers(0, 15))
def test_without_branches_no_other_path_gains_more(
    first: Proposal, second: Proposal, table: dict[Evidence, float], cost: list[float], most: int
) -> None:
    tree = merged(first, second)
    chances = chances_of(table, first, second)
    selection = tree.select(table.__getitem__, cost.__getitem__, most, branches=False)
    assert selection.proposal.parents is None
    gains = [
        sum(chances[path[: length + 1]] for length in range(len(path))) - cost[len(path)]
        for path in chances
        if 0 < len(path) <= most
    ]
    assert selection.gain == pytest.approx(max([0.0, *gains]))
    assert len(selection.proposal) <= max(most, 0)


@given(proposals(), proposals(), acceptances, costs)
def test_the_trunk_comes_first_and_no_other_path_promises_more(
    first: Proposal, second: Proposal, table: dict[Evidence, float], cost: list[float]
) -> None:
    tree = merged(first, second)
    proposal = tree.select(table.__getitem__, cost.__getitem__, 15).proposal
    chances = chances_of(table, first, second)
    promises = [sum(chances[path[: length + 1]] for length in range(len(path))) for path in paths_of(proposal)]
    if promises:
        assert promises[proposal.trunk - 1] == pytest.approx(max(promises))
    rest = [chances[path] for path in paths_of(proposal)[proposal.trunk :]]
    assert rest == sorted(rest, reverse=True)


def test_a_step_in_the_cost_is_looked_across() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2, 3), evidence=(("sure",),) * 3))
    cost = [0.0, 1.2, 1.2, 1.2]  # alone, the first token is not worth it
    assert tree.select(lambda evidence: 0.8, cost.__getitem__, most=3).proposal.tokens == (1, 2, 3)
    assert tree.select(lambda evidence: 0.8, cost.__getitem__, most=1) == Selection(Proposal(), 0.0, 0.0)


def test_a_chain_comes_without_parents() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2), parents=(-1, 0), evidence=(("a",), ("b",))))
    assert everything(tree) == Proposal((1, 2), evidence=(("a",), ("b",)))


def laws(count: int) -> list[np.ndarray]:
    return [np.full(8, index + 1.0) for index in range(count)]


@given(proposals(4), proposals(4), st.integers(1, 4), st.integers(0, 2), acceptances, costs, st.booleans())
def test_laws_stay_with_the_rows_whose_children_were_drawn_from_them(
    below: Proposal,
    beside: Proposal,
    length: int,
    prefix: int,
    table: dict[Evidence, float],
    cost: list[float],
    branches: bool,
) -> None:
    lead, drawn = (5, 6)[:prefix], (7, 4, 7, 4)[:length]
    q = laws(length)
    tree = CandidateTree()
    tree.add(Proposal(lead, evidence=(("some drafter", 0),) * prefix))
    tree.add(Proposal(drawn, q, evidence=(("some drafter", 1),) * length), at=lead)
    tree.add(below, at=lead + drawn)
    tree.add(beside)
    tree.add(Proposal((1, 2), evidence=(("some drafter", 5),) * 2), at=lead)  # has no place beside what was drawn
    selection = tree.select(table.__getitem__, cost.__getitem__, 12, branches)
    proposal = selection.proposal

    assert proposal.tokens[: prefix + length] == lead + drawn  # neither dropped nor torn, whatever they are worth
    assert proposal.trunk >= prefix + length
    for row, children in enumerate(proposal.children):
        law = proposal.law(row)
        if prefix <= row < prefix + length:
            assert law is q[row - prefix] and children == [row]
        else:
            assert law is None


def test_whether_a_drawn_token_is_kept_does_not_depend_on_what_continues_it() -> None:
    """That somebody can continue a token says something about the token: choosing by it would bias the text."""
    for continued in (False, True):
        tree = CandidateTree()
        tree.add(Proposal((1, 2), laws(2), evidence=(("model",), ("model",))))
        if continued:
            tree.add(Proposal((3, 4), evidence=(("suffix",),) * 2), at=(1, 2))
        for price in (0.0, 5.0):
            selected = tree.select(lambda evidence: 0.9, lambda size, price=price: price * size, most=4)
            assert selected.proposal.tokens[:2] == (1, 2)
            assert len(selected.proposal) == (4 if continued and not price else 2)


def test_a_drawn_chain_longer_than_allowed_is_cut_at_the_end() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1, 2, 3), laws(3)))
    for branches in (False, True):
        proposal = tree.select(lambda evidence: 0.5, FREE.__getitem__, 2, branches).proposal
        assert proposal.tokens == (1, 2)
        assert [proposal.law(row)[0] for row in range(2)] == [1.0, 2.0]  # type: ignore[index]
    assert len(tree.select(lambda evidence: 0.5, FREE.__getitem__, 0).proposal) == 0


def test_drawn_tokens_go_before_likelier_ones_where_there_is_no_room_for_both() -> None:
    tree = CandidateTree()
    tree.add(Proposal((5,), evidence=(("suffix",),)))
    tree.add(Proposal((1, 2), laws(2), evidence=(("model",), ("model",))), at=(5,))
    tree.add(Proposal((6, 7), evidence=(("suffix",), ("suffix",))))
    acceptance = {("suffix",): 0.9, ("model",): 0.1}
    selection = tree.select(acceptance.__getitem__, FREE.__getitem__, most=3)
    assert selection.proposal.tokens == (5, 1, 2)
    assert selection.accepted == pytest.approx(0.9 + 0.09 + 0.009)


def test_what_cannot_be_merged_is_refused() -> None:
    tree = CandidateTree()
    tree.add(Proposal((1,)))
    with pytest.raises(ValueError, match="needs a place without children; add it before"):
        tree.add(Proposal((2,), laws(1)))
    with pytest.raises(ValueError, match="a drawn tree cannot be merged"):
        tree.add(Proposal((2, 3), laws(1), parents=(-1, -1)), at=(1,))
    tree.add(Proposal((2,), laws(1)), at=(1,))
    with pytest.raises(ValueError, match="holds a drawn proposal already"):
        tree.add(Proposal((3,), laws(1)), at=(1, 2))
