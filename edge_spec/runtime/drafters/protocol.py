"""What a drafter is: something that proposes a continuation and learns from the target's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.context import Context
from edge_spec.runtime.proposal import Proposal as Proposal


class Drafter(Protocol):
    """Proposes tokens that the target then verifies. Nothing a drafter does can change the text, only the speed.

    One rule is owed in return: whether a token is proposed may depend on the tokens before it and on the law it is
    drawn from, never on the token itself. Dropping unlikely draws after the fact would bias what is emitted.
    """

    @property
    def name(self) -> str:
        """The name users select the drafter by."""
        ...

    @property
    def default_budget(self) -> int:
        """Tokens proposed per round where the request does not say."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory held now, in bytes."""
        ...

    def propose(self, context: Context, budget: int) -> Proposal:
        """A continuation of ``context.tokens`` of at most ``budget`` tokens.

        A drafter may remember what it has read: between two calls the text only grows, unless ``rollback`` says
        otherwise.
        """
        ...

    def observe(self, accepted: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Learn from a verified round.

        Args:
            accepted: the tokens the round committed, the target's own included.
            logits: float32 [rows, vocab], the target's logits; row i is what token i was chosen from.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forget everything known about positions from ``length`` on; 0 precedes another text."""
        ...
