"""What a drafter is: something that proposes a continuation and learns from the target's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edge_spec.runtime.context import Context
from edge_spec.runtime.logit_rows import LogitRows
from edge_spec.runtime.proposal import Evidence, Proposal


@dataclass(frozen=True)
class Budget:
    """How much a drafter may propose.

    Attributes:
        tokens: the most draft tokens.
        branches: whether the proposal may be a tree.
        another: asked before each token that costs time to draft, with the evidence of the chain drafted so far: is it
            worth going on? Drafters that propose for nothing need not ask.
        ahead: asked likewise by drafters that draft several tokens at once: how many more are expected to be worth it?
        worth: asked before each token that is drawn from a law but costs no more time to draft, with the evidence of
            the chain so far and that of the token itself, which must not depend on the draw: is it worth verifying?
    """

    tokens: int
    branches: bool = False
    another: Callable[[Sequence[Evidence]], bool] = lambda chain: True
    ahead: Callable[[Sequence[Evidence]], float] = lambda chain: math.inf
    worth: Callable[[Sequence[Evidence]], bool] = lambda chain: True


@dataclass(frozen=True)
class Outcome:
    """What the target said to a proposal.

    Attributes:
        last: the token before the proposal, which row 0 follows.
        proposal: what was verified.
        path: the draft tokens that agree with the target, as indices into the proposal, each the parent of the next.
        next_token: the target's own token after them.
        logits: rows [rows, vocab], as the target computed them; row 0 follows ``last``, row i + 1 follows token i of
            the proposal. Valid during the call. Whole rows may have to come from the device, their likeliest tokens
            are here.
    """

    last: int
    proposal: Proposal
    path: tuple[int, ...]
    next_token: int
    logits: LogitRows


class Drafter(Protocol):
    """Proposes tokens that the target then verifies.

    At temperature 0 and under the rule ``coupled``, nothing that is proposed can change the text, only the speed.

    Under the other rules one thing is owed in return: whether a token is proposed may depend on the tokens before it
    and on the law it is drawn from, never on the token itself. Dropping unlikely draws after the fact would bias what
    is emitted. The same holds for a token's evidence.
    """

    @property
    def name(self) -> str:
        """The name users select the drafter by."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory held now, in bytes."""
        ...

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A continuation of ``context.tokens`` and ``prefix``, the likeliest path first.

        A drafter may remember what it has read of the context: between two calls the text only grows, unless
        ``rollback`` says otherwise.

        Args:
            context: the text so far.
            budget: how much may be proposed.
            prefix: tokens that are proposed already, and that this proposal extends. They are not part of the text.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from the target's answer to a round's proposal, whoever made it."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything known about positions from ``length`` on; 0 precedes another text."""
        ...


@runtime_checkable
class RemembersTexts(Protocol):
    """A drafter that keeps what it knows of several texts apart. Where texts take turns, others begin again."""

    def switch(self, context: Context) -> None:
        """Go on with this text, which may be new. Called instead of ``rollback(0)``."""
        ...


class CostlyDrafter(Drafter, RemembersTexts, Protocol):
    """A drafter with a network of its own, whose calls take time and whose cache takes memory.

    At most one is in use at a time. It is asked only where that pays, and where memory is short it is the first to go:
    meanwhile it proposes nothing.
    """

    @property
    def ready(self) -> bool:
        """Whether the network is there."""
        ...

    @property
    def window(self) -> int:
        """Most tokens in the cache of a text, and about as many in those of all texts together."""
        ...

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens it has to read before it can propose what follows ``context`` and ``prefix``."""
        ...

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        ...

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen; the name comes first."""
        ...

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """How many calls with one row it takes, or takes as long as, to draft so many tokens.

        Args:
            tokens: one at least.
            context: the text so far; ``None`` for a greedy request in general.
            branches: whether runners-up are wanted.
        """
        ...

    def bytes_beyond(self, window: int) -> int:
        """Bytes that :meth:`narrow` would give back."""
        ...

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens in the cache from now on, and give back the memory of the others.

        A window wider than before lets the cache grow again. Raises RequestError if it is too small.
        """
        ...

    def unload(self) -> None:
        """Give the network up, and so its memory, unless somebody else holds it too. Doing so twice does no harm."""
        ...

    def reload(self) -> None:
        """Load the network again if it was given up; it has then read nothing.

        Raises:
            RequestError: nobody said how to load it.
            Exception: whatever loading raises; the network is then still away.
        """
        ...
