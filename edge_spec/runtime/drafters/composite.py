"""Several drafters as one: their proposals merged into one tree, and chains of one extended by the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.candidate_tree import CandidateTree
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
from edge_spec.runtime.proposal import Proposal


class CompositeDrafter:
    """Asks its drafters in turn; each adds alternatives to what is there, and continues the chain of the one before.

    A chain drawn from a draft's law stays as it is, since what else is proposed in its places would change the law.
    """

    name = "composite"

    def __init__(self, drafters: Sequence[Drafter], acceptance: AcceptanceTable) -> None:
        """Ask ``drafters``, in this order, the cheapest first; ``acceptance`` says what their tokens are worth."""
        self.drafters = tuple(drafters)
        self._acceptance = acceptance

    @property
    def memory_bytes(self) -> int:
        """Bytes held by all of them."""
        return sum(drafter.memory_bytes for drafter in self.drafters)

    def collect(
        self,
        candidates: CandidateTree,
        context: Context,
        budget: Budget,
        prefix: Sequence[int] = (),
        at: tuple[int, ...] = (),
    ) -> None:
        """Add to ``candidates`` all that the drafters propose.

        Args:
            candidates: what to add to.
            context: the text so far.
            prefix: what to continue behind it.
            budget: what every drafter may propose, and once more behind the chain of the one before it.
            at: the path in ``candidates`` that belongs to ``prefix``.
        """
        chain: tuple[int, ...] = ()
        for drafter in self.drafters:
            own = self._ask(drafter, context, budget, prefix)
            if own.q is not None:
                # What was drawn takes no other tokens beside it, and would change with what is drawn from.
                if not candidates.continues(at):
                    candidates.add(own, at)
                    return
                continue
            candidates.add(own, at)
            if chain:
                behind = self._ask(drafter, context, budget, (*prefix, *chain))
                if behind.q is None:
                    candidates.add(behind, (*at, *chain))
            chain = own.tokens[: own.trunk] or chain

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """The likeliest ``budget.tokens`` of all that the drafters propose; see :class:`Drafter`."""
        candidates = CandidateTree()
        self.collect(candidates, context, budget, prefix)
        return candidates.select(self._acceptance.estimate, lambda tokens: 0.0, budget.tokens, budget.branches).proposal

    def _ask(self, drafter: Drafter, context: Context, budget: Budget, prefix: Sequence[int]) -> Proposal:
        proposal = drafter.propose(context, budget, prefix).attributed(drafter.name)
        # The coupled rule does not look at laws, and without them proposals can be merged.
        return replace(proposal, q=None) if context.coupled or context.noise is None else proposal

    def observe(self, outcome: Outcome) -> None:
        """Let all of them learn."""
        for drafter in self.drafters:
            drafter.observe(outcome)

    def rollback(self, length: int) -> None:
        """Make all of them forget positions from ``length`` on."""
        for drafter in self.drafters:
            drafter.rollback(length)
