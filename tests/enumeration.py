"""Every outcome of a round of drafting and verification, with its exact probability.

A rule makes its random decisions through a :class:`Chance`. Here chance is a script: the rule is run once for every
sequence of decisions it could meet, and the probabilities it named along the way multiply to that sequence's own. So
the law of what a round emits is computed, not estimated, and compared with the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.proposal import Law, Proposal
from edge_spec.runtime.verification import RULES, Chance, Laws, Verdict

Prefix = tuple[int, ...]
LawTable = dict[Prefix, Law]  # the law after every prefix
Verify = Callable[[Laws, Proposal, Chance], Verdict]
Grow = Callable[[Prefix, tuple[int, ...]], int | None]
"""A drafter's plan: the parent of the next draft token, by the tokens drawn so far and their parents; None to stop."""


class _Open(Exception):
    """The script ends at a decision with these probabilities."""

    def __init__(self, shares: Law) -> None:
        self.shares = shares


class _Script:
    """Chance that takes its decisions from a list."""

    def __init__(self, decisions: Sequence[int]) -> None:
        self._decisions = iter(decisions)
        self._asked: set[object] = set()

    def keep(self, node: int, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return bool(self._decide(("keep", node), np.array([1.0 - probability, probability])))

    def draw(self, weights: Law) -> int:
        assert (weights >= 0).all() and weights.any()
        return self._decide("draw", weights.astype(np.float64) / weights.sum(dtype=np.float64))

    def gumbel(self, depth: int, vocab: int) -> NDArray[np.float64]:
        raise AssertionError("only the coupled rule uses Gumbel noise")

    def _decide(self, what: object, shares: Law) -> int:
        assert what not in self._asked, f"asked twice: {what}"
        self._asked.add(what)
        decision = next(self._decisions, None)
        if decision is None:
            raise _Open(shares)
        return decision


def outcomes(verify: Verify, p: Laws, proposal: Proposal) -> Iterator[tuple[float, Verdict]]:
    """Every verdict a rule can give, with its probability. Verdicts can appear several times."""
    pending: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while pending:
        chance, decisions = pending.pop()
        try:
            yield chance, verify(p, proposal, _Script(decisions))
        except _Open as branch:
            pending.extend(
                (chance * share, (*decisions, decision))
                for decision, share in enumerate(branch.shares.tolist())
                if share
            )


def fixed(*parents: int) -> Grow:
    """The plan to draw a tree of this shape, whatever is drawn."""
    return lambda tokens, drawn: parents[len(tokens)] if len(tokens) < len(parents) else None


def chain(length: int) -> Grow:
    """The plan to draw a chain."""
    return fixed(*range(-1, length - 1))


def prefix_of(node: int, tokens: Sequence[int], parents: Sequence[int]) -> Prefix:
    """The tokens from the context to a node, its own included; none for node -1."""
    return () if node < 0 else (*prefix_of(parents[node], tokens, parents), tokens[node])


def drafts(q: LawTable, grow: Grow, replacement: bool = False) -> Iterator[tuple[float, Proposal]]:
    """Every proposal that a drafter can draw, with its probability."""
    pending: list[tuple[float, Prefix, tuple[int, ...]]] = [(1.0, (), ())]
    while pending:
        chance, tokens, parents = pending.pop()
        parent = grow(tokens, parents)
        law = None if parent is None else q[prefix_of(parent, tokens, parents)].copy()
        if law is not None and not replacement:
            law[[token for token, other in zip(tokens, parents, strict=True) if other == parent]] = 0.0
        if parent is None or law is None or not law.any():  # done, or nothing left to draw
            rows = [
                q[prefix_of(row - 1, tokens, parents)] if row - 1 in parents else None for row in range(len(tokens))
            ]
            yield chance, Proposal(tokens, rows, parents, replacement)
            continue
        law /= law.sum()
        pending.extend(
            (chance * share, (*tokens, token), (*parents, parent)) for token, share in enumerate(law.tolist()) if share
        )


@dataclass
class Round:
    """The exact law of a round.

    Attributes:
        emitted: the probability of every sequence of emitted tokens.
        accepted: the expected number of draft tokens kept.
    """

    emitted: dict[Prefix, float] = field(default_factory=dict)
    accepted: float = 0.0

    def distance(self, p: LawTable) -> float:
        """Total variation between the text of this round, continued by plain decoding, and plain decoding alone."""
        vocab, length = len(p[()]), max(map(len, self.emitted))
        law = np.zeros((vocab,) * length)
        for tokens, share in self.emitted.items():
            law[tokens] += share * _continuation(p, tokens, length)
        return float(np.abs(law - _continuation(p, (), length)).sum()) / 2


def round_law(verify: Verify, p: LawTable, proposals: Iterator[tuple[float, Proposal]]) -> Round:
    """Compute what a rule emits over all proposals."""
    law = Round()
    for drafted, proposal in proposals:
        parents = proposal.parents or range(-1, len(proposal) - 1)
        rows = [p[prefix_of(node, proposal.tokens, parents)] for node in range(-1, len(proposal))]
        for decided, verdict in outcomes(verify, rows, proposal):
            tokens = (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)
            assert tokens[:-1] == prefix_of(verdict.path[-1] if verdict.path else -1, proposal.tokens, parents)
            law.emitted[tokens] = law.emitted.get(tokens, 0.0) + drafted * decided
            law.accepted += drafted * decided * verdict.accepted
    return law


EXACT = 1e-12
CHAIN_RULES = {name: RULES[name].verify for name in ("token", "block", "traversal")}
TREES = {
    "siblings": fixed(-1, -1),
    "three siblings": fixed(-1, -1, -1),
    "fork": fixed(-1, 0, 0),
    "depth first": fixed(-1, 0, 0, -1, 3),
    "breadth first": fixed(-1, -1, 0, 0, 1),
    "trunk and branches": fixed(-1, 0, 1, 0, -1),
    "bush": fixed(-1, -1, -1, 0, 0),
    "late sibling": fixed(-1, 0, -1, 2, -1),
}


def law_pairs(seed: int, vocab: int, depth: int, kinds: Sequence[str]) -> tuple[LawTable, LawTable]:
    """Laws of a target and a drafter after every prefix of at most ``depth`` tokens, each pair of a random kind."""
    generator = np.random.default_rng(seed)
    p: LawTable = {}
    q: LawTable = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            p[prefix], q[prefix] = law_pair(generator, vocab, str(generator.choice(kinds)))
    return p, q


KINDS = ("any", "equal", "disjoint", "one-hot p", "one-hot q", "zeros", "near tie", "last bit", "tiny")


def law_pair(generator: np.random.Generator, vocab: int, kind: str) -> tuple[Law, Law]:
    """Laws of target and drafter in a certain relation."""
    p, q = generator.exponential(size=(2, vocab)) ** 2 + 1e-3
    token = generator.integers(vocab)
    if kind == "equal":
        q = p
    elif kind == "disjoint":
        mine = generator.random(vocab) < 0.5
        mine[token], mine[token - 1] = True, False
        p, q = np.where(mine, p, 0.0), np.where(mine, 0.0, q)
    elif kind == "one-hot p":
        p = np.eye(vocab)[token]
    elif kind == "one-hot q":
        q = np.eye(vocab)[token]
    elif kind == "zeros":
        p[generator.random(vocab) < 0.5] = 0.0
        q[generator.random(vocab) < 0.5] = 0.0
        p[token] += 0.1
        q[generator.integers(vocab)] += 0.1
    elif kind == "near tie":
        q = p * (1.0 + 1e-9 * generator.normal(size=vocab))
    elif kind == "last bit":
        q = np.nextafter(p, p + generator.normal(size=vocab))
    elif kind == "tiny":
        p, q = p * 10.0 ** generator.integers(-300, 1, vocab), q * 10.0 ** generator.integers(-300, 1, vocab)
    return p / p.sum(), q / q.sum()


def distance(verify: Verify, p: LawTable, q: LawTable, grow: Grow, replacement: bool = False) -> float:
    """Total variation between what a rule emits and what the target would have emitted."""
    return round_law(verify, p, drafts(q, grow, replacement)).distance(p)


def _continuation(p: LawTable, prefix: Prefix, length: int) -> NDArray[np.float64]:
    """The joint law, [vocab] * remaining, of the tokens that follow a prefix up to a length."""
    if len(prefix) == length:
        return np.ones(())
    parts = [_continuation(p, (*prefix, token), length) for token in range(len(p[()]))]
    return np.stack([share * part for share, part in zip(p[prefix], parts, strict=True)])
