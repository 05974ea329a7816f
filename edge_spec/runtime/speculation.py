"""Who decides what is proposed in a round: here, a fixed number of tokens from one drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
from edge_spec.runtime.proposal import Proposal


@dataclass(frozen=True)
class Timing:
    """Where the time of a round went.

    Attributes:
        rows: tokens fed to the target.
        past: tokens that its cache held before.
        draft_seconds, verify_seconds, total_seconds: time spent proposing, in the target's call, and in all.
    """

    rows: int
    past: int
    draft_seconds: float
    verify_seconds: float
    total_seconds: float


class Speculation(Protocol):
    """Decides what every round proposes, and learns from what became of it."""

    def propose(self, context: Context, guess: tuple[int, ...], most: int) -> Proposal:
        """What the target should verify.

        Args:
            context: the text so far.
            guess: tokens that a branch of the last round's tree says come next, almost surely. Whatever is proposed,
                they are best proposed first.
            most: the most tokens; 0 if the text has no room for any.
        """
        ...

    def observe(self, outcome: Outcome, emitted: int, timing: Timing) -> None:
        """Learn from a round.

        Args:
            outcome: what the target said.
            emitted: tokens it appended to the text; less than the outcome tells where branches were deferred.
            timing: what it took.
        """
        ...


class FixedDraft:
    """Proposes the same number of tokens from the same drafter in every round, whatever it costs."""

    def __init__(self, drafter: Drafter, tokens: int, branches: bool) -> None:
        """Draft with ``drafter``, ``tokens`` a round, as a tree if ``branches`` and the drafter can."""
        self._drafter = drafter
        self._tokens = tokens
        self._branches = branches

    def propose(self, context: Context, guess: tuple[int, ...], most: int) -> Proposal:
        """The guess, then what the drafter says to it."""
        most = min(most, self._tokens)
        guess = guess[:most]
        proposal = Proposal()
        if most > len(guess):
            proposal = self._drafter.propose(context, Budget(most - len(guess), self._branches), guess)
            proposal = proposal.attributed(self._drafter.name)
        return proposal.after(guess) if guess else proposal

    def observe(self, outcome: Outcome, emitted: int, timing: Timing) -> None:
        """Let the drafter learn."""
        self._drafter.observe(outcome)
