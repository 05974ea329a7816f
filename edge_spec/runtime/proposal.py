"""What a drafter proposes: a chain or a tree of tokens, and the laws they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Law: TypeAlias = NDArray[np.floating[Any]]

# What speaks for a draft token: the name of its drafter, then what the drafter saw, such as the length of a match.
# Draft tokens with the same evidence are expected to be accepted equally often. All of it is hashable.
Evidence: TypeAlias = tuple[str | int, ...]
UNKNOWN: Evidence = ("draft",)  # where a drafter does not say
DEFERRED: Evidence = ("deferred",)  # of tokens that a branch of the round before has told


def deferred_evidence(depth: int) -> Evidence:
    """What speaks for a token that a branch of the round before has told, the ``depth``-th of them from 0."""
    return (*DEFERRED, min(depth, 3))


@dataclass(frozen=True)
class Proposal:
    """Draft tokens, laid out as a tree with parents first. A chain is a tree without siblings.

    The target answers with one row more than there are tokens: **row 0 follows the context, row i + 1 follows
    token i**. Everything that belongs to a place in the tree is numbered by rows.

    Attributes:
        tokens: the draft tokens; none is a valid proposal. The likeliest path comes first.
        q: ``q[row]`` is the law, float [vocab], that the *children* of that row were drawn from, or ``None`` if they
            were not drawn but determined by what precedes them. So a chain's token i was drawn from ``q[i]``. Rows at
            the end that have no children may be missing; ``None`` in place of all: every token is determined.
        parents: ``parents[i] < i`` is the token that token i continues, -1 the context. ``None``: a chain.
        replacement: whether siblings were drawn independently of each other. If not, each was drawn from what its
            elder siblings left of the law. Either way siblings that were drawn stand **in the order they were drawn**;
            determined ones may stand in any.
        evidence: what speaks for each token; ``None`` if its drafter does not say.

    Raises:
        ValueError: the parents do not describe a tree of these tokens.
    """

    tokens: tuple[int, ...] = ()
    q: NDArray[np.floating[Any]] | Sequence[Law | None] | None = None
    parents: tuple[int, ...] | None = None
    replacement: bool = False
    evidence: tuple[Evidence, ...] | None = None

    def __post_init__(self) -> None:
        if self.evidence is not None and len(self.evidence) != len(self.tokens):
            raise ValueError(f"{len(self.evidence)} evidences for {len(self.tokens)} tokens, expected one for each")
        if self.parents is None:
            return
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens, expected one for each")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"the parent of token {node} is {parent}, expected an earlier token, or -1 for none")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trunk(self) -> int:
        """How many tokens, from the first, form a chain: each continues the one before it."""
        if self.parents is None:
            return len(self.tokens)
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self.tokens))

    @property
    def depths(self) -> list[int]:
        """How many tokens lead from the context to each token, itself included."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def is_chain(self) -> bool:
        """Whether every token continues the one before it, the first the context."""
        return self.trunk == len(self.tokens)

    @property
    def children(self) -> list[list[int]]:
        """For every row, the tokens (as indices) that continue it, in order."""
        rows: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node in range(len(self.tokens)):
            rows[(node - 1 if self.parents is None else self.parents[node]) + 1].append(node)
        return rows

    def ancestry(self) -> NDArray[np.bool_]:
        """Which rows lead to which: bool [rows, rows], true where row j is row i or lies on its way to the root."""
        rows = np.eye(len(self.tokens) + 1, dtype=np.bool_)
        rows[:, 0] = True
        for node in range(len(self.tokens)):
            rows[node + 1] |= rows[(node - 1 if self.parents is None else self.parents[node]) + 1]
        return rows

    def first(self, count: int) -> Proposal:
        """The same without all but the first ``count`` tokens."""
        return Proposal(
            self.tokens[:count],
            None if self.q is None else self.q[:count],
            None if self.parents is None else self.parents[:count],
            self.replacement,
            None if self.evidence is None else self.evidence[:count],
        )

    def attributed(self, name: str) -> Proposal:
        """The same with evidence: just the drafter's name, if it does not say more."""
        if self.evidence is not None or not self.tokens:
            return self
        return replace(self, evidence=((name,),) * len(self.tokens))

    def after(self, tokens: Sequence[int]) -> Proposal:
        """The same behind a chain of tokens that a branch of the round before has told."""
        count = len(tokens)
        shifted = (
            None if self.parents is None else (*range(-1, count - 1), *(parent + count for parent in self.parents))
        )
        evidence = self.evidence or (UNKNOWN,) * len(self.tokens)
        return Proposal(
            (*tokens, *self.tokens),
            None if self.q is None else [*(None for _ in tokens), *self.q],
            shifted,
            self.replacement,
            (*(deferred_evidence(depth) for depth in range(count)), *evidence),
        )

    def law(self, row: int) -> Law | None:
        """The law the children of ``row`` were drawn from; ``None`` if they were determined."""
        return None if self.q is None or row >= len(self.q) else self.q[row]
