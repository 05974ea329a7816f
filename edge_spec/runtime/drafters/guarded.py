"""An app's own drafter, kept from doing harm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from operator import index

import numpy as np

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
from edge_spec.runtime.proposal import Proposal

_LOG = logging.getLogger(__name__)


class GuardedDrafter:
    """Passes on what a drafter proposes, if it can be verified.

    Whatever else the drafter does costs its proposals and not the text: an exception, or a proposal that is none, is
    logged with the drafter's name, and the drafter is left alone until the next text.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Guard ``drafter``, whose tokens must be below ``vocab_size``."""
        self.name = drafter.name
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._retired = False

    @property
    def memory_bytes(self) -> int:
        """Bytes that the drafter says it holds."""
        return self._drafter.memory_bytes

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """What the drafter proposes, cut to the budget; nothing if it cannot be verified."""
        if self._retired:
            return Proposal()
        length = len(context.tokens)
        try:
            return self._checked(self._drafter.propose(context, budget, prefix), budget)
        except Exception as error:
            self._retire("propose", error)
            return Proposal()
        finally:
            del context.tokens[length:]  # the text is not the drafter's to write

    def observe(self, outcome: Outcome) -> None:
        """Let the drafter learn."""
        if not self._retired:
            try:
                self._drafter.observe(outcome)
            except Exception as error:
                self._retire("observe", error)

    def rollback(self, length: int) -> None:
        """Make the drafter forget; a new text gives it a new chance."""
        self._retired = self._retired and length > 0
        if not self._retired:
            try:
                self._drafter.rollback(length)
            except Exception as error:
                self._retire("rollback", error)

    def _retire(self, part: str, error: Exception) -> None:
        self._retired = True
        _LOG.warning("the drafter %r is not asked again for this text: %s failed with %r", self.name, part, error)

    def _checked(self, proposal: object, budget: Budget) -> Proposal:
        """The proposal within budget and vocabulary. Raises an exception of any kind if it is malformed."""
        if not isinstance(proposal, Proposal):
            raise TypeError(f"{proposal!r:.80} is no Proposal")
        tokens = tuple(index(token) for token in proposal.tokens)
        parents = None if proposal.parents is None else tuple(index(parent) for parent in proposal.parents)
        if outside := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise ValueError(f"token {outside[0]} is not in the vocabulary of {self._vocab_size}")
        checked = replace(proposal, tokens=tokens, parents=parents).first(max(budget.tokens, 0))
        if not budget.branches:
            checked = replace(checked.first(checked.trunk), parents=None)
        for row, children in enumerate(checked.children):
            law = checked.law(row)
            if law is not None and children:
                values = np.asarray(law)
                if values.shape != (self._vocab_size,) or values.dtype.kind != "f":
                    raise ValueError(
                        f"a law is {values.dtype} {list(values.shape)}, expected float [{self._vocab_size}]"
                    )
                if not np.isfinite(values).all() or values.min() < 0 or abs(float(values.sum()) - 1.0) > 1e-3:
                    raise ValueError("a law is not a distribution")
                if any(values[checked.tokens[node]] == 0 for node in children):
                    raise ValueError("a token was drawn from a law that excludes it")
                if len(children) > 1 or not checked.is_chain:
                    raise ValueError("a tree was drawn; draw a chain, or determine the tokens")
        given: tuple[object, ...] = checked.evidence or ()
        for evidence in given:
            if not isinstance(evidence, tuple) or not evidence or not isinstance(evidence[0], str):
                raise TypeError(f"evidence is {evidence!r:.80}, expected a tuple that begins with a name")
            hash(evidence)
        return checked
