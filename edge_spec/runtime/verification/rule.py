"""What every verification rule takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.proposal import Law, Proposal


@dataclass(frozen=True)
class Verdict:
    """The outcome of one target call.

    Attributes:
        path: the draft tokens that are kept, as indices into the proposal, each the parent of the next; for a chain
            the first few.
        next_token: the target's own token after them: the replacement of a rejected one, or the bonus.
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def accepted(self) -> int:
        """How many draft tokens are kept."""
        return len(self.path)


class Laws(Protocol):
    """The target's laws by row, see :class:`Proposal`: an array [rows, vocab], or something that computes rows."""

    def __getitem__(self, row: int, /) -> Any:
        """The law of the token that follows ``row``, float [vocab]."""
        ...


class Chance(Protocol):
    """How a rule meets chance. Rules make every random decision here, and each at most once a round."""

    def keep(self, node: int, probability: float) -> bool:
        """Whether draft token number ``node`` is kept, which happens with this probability."""
        ...

    def draw(self, weights: Law) -> int:
        """The target's own token, by weights [vocab] that need not sum to one. Asked for once."""
        ...

    def gumbel(self, depth: int, vocab: int) -> NDArray[np.floating[Any]]:
        """Gumbel noise [vocab] for the token that follows ``depth`` tokens of this round."""
        ...


class SparseChance(Chance, Protocol):
    """Chance that tells the noise of a few tokens faster than that of all."""

    def gumbel_of(self, depth: int, vocab: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """What :meth:`gumbel` says of some tokens, float32 [n]."""
        ...

    def louder(self, depth: int, vocab: int, least: float) -> NDArray[np.int64]:
        """All tokens whose noise exceeds ``least``, ascending, int64 [n], and maybe some that nearly do."""
        ...


@dataclass(frozen=True)
class Rule:
    """A verification rule and what it asks of proposals.

    Attributes:
        name: what users select it by.
        verify: (the target's laws, proposal, chance) -> verdict.
        trees: whether proposals may be trees; if not, they must be chains.
        coupled: whether drafters should choose tokens with the round's Gumbel noise, the same that the target uses. If
            not, they draw tokens and say from which law, or determine them.
    """

    name: str
    verify: Callable[[Laws, Proposal, Chance], Verdict]
    trees: bool
    coupled: bool


def require_chain(proposal: Proposal, rule: str) -> None:
    """Refuse a tree.

    Raises:
        ValueError: the proposal is not a chain.
    """
    if not proposal.is_chain:
        raise ValueError(f"the {rule} rule verifies chains, and this proposal is a tree; use coupled or traversal")
