"""The measurement that finds every rule exact notices every fault: broken rules, and drafters that cheat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.runtime.proposal import Law, Proposal
from edge_spec.runtime.verification import RULES, Chance, Laws, Verdict
from edge_spec.runtime.verification.residual import acceptance_probability, reject, residual
from enumeration import (
    CHAIN_RULES,
    EXACT,
    TREES,
    Grow,
    LawTable,
    Verify,
    chain,
    distance,
    drafts,
    fixed,
    law_pairs,
    round_law,
)

NOTICED = 1e-3
token, block, traversal = (RULES[name].verify for name in ("token", "block", "traversal"))


def strange(length: int = 2) -> tuple[LawTable, LawTable]:
    """Laws on which every fault shows."""
    return law_pairs(10, 4, length + 1, ["any"])


Faulty = Callable[[Law, Law | None, int, float], tuple[Law, float]]


def total(law: Law) -> float:
    return float(law.sum())


REJECTIONS: dict[str, Faulty] = {
    "residual is the target's law": lambda p, q, x, a: (p, reject(p, q, x, a)[1]),
    "residual forgets the weight": lambda p, q, x, a: (residual(p, q, x), reject(p, q, x, a)[1]),
    "residual from the wrong side": lambda p, q, x, a: (np.maximum(q - a * p, 0) + 1e-9, reject(p, q, x, a)[1]),
    "residual only loses the token": lambda p, q, x, a: (residual(p, None, x), reject(p, q, x, a)[1]),
    "Z forgets the weight": lambda p, q, x, a: (
        residual(p, q, x, a) + 1e-99,
        total(residual(p, q, x)) / (total(residual(p, q, x)) + 1 - a) if a < 1 else 1.0,
    ),
    "Z is not divided by what is left": lambda p, q, x, a: (residual(p, q, x, a) + 1e-99, total(residual(p, q, x, a))),
    "Z is that of the token alone": lambda p, q, x, a: (residual(p, q, x, a) + 1e-99, 1.0 - float(p[x])),
    "the weight stays": lambda p, q, x, a: (residual(p, q, x, a) + 1e-99, a),
    "the weight is spent": lambda p, q, x, a: (residual(p, q, x, a) + 1e-99, 0.0),
}


@pytest.mark.parametrize("fault", REJECTIONS)
@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_wrong_rejection_is_noticed(rule: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = strange()
    assert distance(CHAIN_RULES[rule], p, q, chain(2)) < EXACT
    monkeypatch.setattr(f"edge_spec.runtime.verification.{rule}.reject", REJECTIONS[fault])
    assert distance(CHAIN_RULES[rule], p, q, chain(2)) > NOTICED


@pytest.mark.parametrize("fault", [name for name in REJECTIONS if name.startswith("residual") and "weight" not in name])
def test_a_wrong_residual_of_the_token_rule_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = strange()
    monkeypatch.setattr("edge_spec.runtime.verification.token.reject", REJECTIONS[fault])
    assert distance(token, p, q, chain(2)) > NOTICED


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_wrong_chance_of_a_token_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = strange()
    for wrong in (lambda p, q: p, lambda p, q: min(1.0, q / p), lambda p, q: 1.0):
        monkeypatch.setattr(f"edge_spec.runtime.verification.{rule}.acceptance_probability", wrong)
        assert distance(CHAIN_RULES[rule], p, q, chain(2)) > NOTICED


def bonus_from_the_row_before(verify: Verify) -> Verify:
    def mutant(p: Any, proposal: Proposal, chance: Chance) -> Verdict:
        leaves = {row for row, children in enumerate(proposal.children) if not children}
        return verify([p[row - 1] if row in leaves else p[row] for row in range(len(p))], proposal, chance)

    return mutant


def rows_of_q_shifted(verify: Verify) -> Verify:
    def mutant(p: Any, proposal: Proposal, chance: Chance) -> Verdict:
        return verify(p, replace(proposal, q=[proposal.law(max(row - 1, 0)) for row in range(len(proposal))]), chance)

    return mutant


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("mutation", [bonus_from_the_row_before, rows_of_q_shifted])
def test_laws_of_the_wrong_rows_are_noticed(rule: str, mutation: Callable[[Verify], Verify]) -> None:
    p, q = strange()
    assert distance(mutation(CHAIN_RULES[rule]), p, q, chain(2)) > NOTICED


def block_from_the_front(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
    """Stops at the first part of the block that is not accepted, instead of looking for the longest that is."""
    weights, law = [1.0], p[0]
    for node, x in enumerate(proposal.tokens):
        weights.append(min(1.0, weights[-1] * p[node][x] / proposal.law(node)[x]))
    kept = 0
    while kept < len(proposal):
        follows = kept + 1
        if follows < len(proposal):
            law, weight = reject(p[follows], proposal.law(follows), proposal.tokens[follows], weights[follows])
        else:
            law, weight = p[follows], weights[follows]
        if not chance.keep(kept, weight):
            break
        kept += 1
    if kept < len(proposal):
        law, _ = reject(p[kept], proposal.law(kept), proposal.tokens[kept], weights[kept])
    return Verdict(tuple(range(kept)), chance.draw(law))


def test_a_block_scanned_from_the_front_is_noticed() -> None:
    p, q = strange()
    assert distance(block_from_the_front, p, q, chain(2)) > NOTICED


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("shortest", [0, 1])
def test_a_length_that_depends_on_the_last_token_itself_is_noticed(rule: str, shortest: int) -> None:
    """Anticipation: the drafter drops a last token that it finds unlikely after having drawn it."""
    p, q = strange()

    def anticipating() -> Iterator[tuple[float, Proposal]]:
        for chance, drawn in drafts(q, chain(2)):
            tokens = drawn.tokens
            while len(tokens) > shortest and q[tokens[:-1]][tokens[-1]] < 0.4:
                tokens = tokens[:-1]
            yield chance, Proposal(tokens, [q[tokens[:length]] for length in range(len(tokens))])

    assert round_law(CHAIN_RULES[rule], p, anticipating()).distance(p) > NOTICED


TREE = fixed(-1, -1, 0, 0)


def as_if(**changes: Any) -> Callable[[Proposal], Proposal]:
    return lambda proposal: replace(proposal, **changes)


def siblings_sorted(proposal: Proposal) -> Proposal:
    """Lay siblings out by their probability instead of the order they were drawn in. Leaves only, for simplicity."""
    law = proposal.law(0)
    assert law is not None
    return replace(proposal, tokens=tuple(sorted(proposal.tokens, key=lambda x: -law[x])))


@pytest.mark.parametrize(
    ("grow", "replacement", "change"),
    [
        pytest.param(TREE, False, as_if(replacement=True), id="children not excluded"),
        pytest.param(TREE, True, as_if(replacement=False), id="children excluded though drawn with replacement"),
        pytest.param(TREES["siblings"], False, siblings_sorted, id="siblings sorted after the draw"),
    ],
)
def test_a_tree_described_wrongly_is_noticed(
    grow: Grow, replacement: bool, change: Callable[[Proposal], Proposal]
) -> None:
    p, q = strange()
    assert distance(traversal, p, q, grow, replacement) < EXACT
    changed = ((chance, change(proposal)) for chance, proposal in drafts(q, grow, replacement))
    assert round_law(traversal, p, changed).distance(p) > NOTICED


def test_a_sibling_dropped_for_its_own_sake_is_noticed() -> None:
    p, q = strange()

    def anticipating() -> Iterator[tuple[float, Proposal]]:
        for chance, drawn in drafts(q, TREES["siblings"]):
            kept = 2 if drawn.tokens[1] < 2 else 1
            yield chance, Proposal(drawn.tokens[:kept], [q[()]], (-1, -1)[:kept])

    assert round_law(traversal, p, anticipating()).distance(p) > NOTICED


@pytest.mark.parametrize("fault", REJECTIONS)
def test_a_wrong_rejection_in_a_tree_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = strange()
    monkeypatch.setattr("edge_spec.runtime.verification.traversal.reject", REJECTIONS[fault])
    assert distance(traversal, p, q, TREE) > NOTICED


def test_a_law_of_siblings_that_is_not_renormalized_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(q: Law, x: int) -> Law:
        return np.where(np.arange(len(q)) == x, 0.0, q)

    p, q = strange()
    monkeypatch.setattr("edge_spec.runtime.verification.traversal._without", without)
    assert distance(traversal, p, q, TREES["siblings"]) > NOTICED


def test_children_that_see_their_parents_first_law_are_noticed() -> None:
    """A rejected sibling must change the law the next one is judged by."""

    def mutant(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
        for node, x in enumerate(proposal.tokens):
            if chance.keep(node, acceptance_probability(float(p[0][x]), float(proposal.law(0)[x]))):
                return Verdict((node,), chance.draw(p[node + 1]))
        return Verdict((), chance.draw(reject(p[0], proposal.law(0), proposal.tokens[-1], 1.0)[0]))

    p, q = strange()
    assert distance(mutant, p, q, TREES["siblings"], replacement=True) > NOTICED
