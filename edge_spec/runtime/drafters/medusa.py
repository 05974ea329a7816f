"""Drafting with Medusa heads: all of the next tokens in one call, from one hidden state of the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

from edge_spec.errors import ProviderError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.held_network import HeldNetwork
from edge_spec.runtime.drafters.parallel_choice import parallel_evidence, propose_places
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence, Proposal


class MedusaDrafter(HeldNetwork[MedusaHeads]):
    """Lets each head say what stands in its place, whatever the others say (Cai et al. 2024).

    A text of n tokens has its last token pending, so the latest hidden state is that of token n - 2. From there head h
    speaks of token n + h: the first one of the token that is wanted next, each later one of the token behind. Where m
    tokens are proposed already, the first m heads have nothing to say.

    There is no cache and nothing to read: a text that had no turn for a while costs nothing to come back to.
    """

    name = "head"
    memory_bytes = 0
    window = 0

    def __init__(
        self,
        heads: MedusaHeads,
        target: Model,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        load: Callable[[], MedusaHeads] | None = None,
        vocabulary: DraftVocabulary = WHOLE,
    ) -> None:
        """Draft with some heads.

        Args:
            heads: the network.
            target: the model whose text it is, which keeps the hidden states behind its last layer (``cache.taps``).
            on_call: told rows, cached tokens and seconds of every call of the heads.
            clock: tells the time, in seconds.
            load: loads the heads again, once they were given up.
            vocabulary: what the columns of their logits stand for.
        """
        super().__init__(heads, load)
        self._count = heads.count
        self._target = target
        self._on_call = on_call
        self._clock = clock
        self._vocabulary = vocabulary

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """One row, always."""
        return 1

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """Nothing is cached."""
        return 0

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen."""
        return parallel_evidence(context)

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """One call drafts them all, but no path is longer than there are heads, whatever that would cost."""
        return 1.0 if tokens <= self._count else math.inf

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A tree of what the heads find likely, or a chain where no branches are wanted or tokens are to be drawn.

        Heads that break down cost speed, never the text: where their logits leave no token (NaN), the proposal ends,
        and where ONNX Runtime fails, they are given up. A hidden state that is not there means no proposal.
        """
        last = len(context.tokens) - 2
        taps = self._target.cache.taps
        heads = self._network
        if heads is None or budget.tokens <= 0 or len(prefix) >= self._count:
            return Proposal()
        if taps is None or not taps.start <= last < taps.stop or not budget.another(()):
            return Proposal()
        started = self._clock()
        try:
            logits = heads.logits(taps.read(last, last + 1))
        except ProviderError as error:
            self._give_up(error)
            return Proposal()
        self._on_call(1, 0, self._clock() - started)
        taps.release(last)
        return propose_places(context, prefix, logits, budget, self._vocabulary)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Nothing to forget."""

    def switch(self, context: Context) -> None:
        """Nothing is kept of any text."""

    def bytes_beyond(self, window: int) -> int:
        """There is no cache to give back."""
        return 0

    def narrow(self, window: int) -> None:
        """There is no cache to narrow."""
