"""Drafting with a head that fills a block at once from the target's hidden states: DFlash and DSpark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

from edge_spec.errors import ProviderError
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.block_choice import propose_block
from edge_spec.runtime.drafters.network import NetworkDrafter
from edge_spec.runtime.drafters.parallel_choice import parallel_evidence, propose_places
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_block import BlockReading
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence, Proposal

# How many places more than are expected to be worth it are looked at, since of each some turn out better than usual.
_HOPE = 2


class BlockDrafter(NetworkDrafter[BlockHead, BlockReading]):
    """Lets a head fill in the places behind the text's last token, which it sees beside the target's hidden states.

    Where tokens are proposed already, their places are left out; the others are as they were. A text is known by the
    target's cache, so what was read of a conversation is kept for its next turn.
    """

    name = "head"

    def __init__(
        self,
        head: BlockHead,
        target: Model,
        window: int | None = None,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        load: Callable[[], BlockHead] | None = None,
    ) -> None:
        """Draft with a head.

        Args:
            head: the network.
            target: the model whose text it is, which keeps the hidden states that the head reads (``cache.taps``).
            window: most tokens in the head's cache; ``None`` for all of its context.
            on_call: told rows, cached tokens and seconds of every call of the head.
            clock: tells the time, in seconds.
            load: loads the head again, once it was given up.

        Raises:
            RequestError: the window is too small.
        """
        super().__init__(head, window, load)
        self._tokens = head.tokens
        self._target = target
        self._on_call = on_call
        self._clock = clock

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many hidden states it has to read before it can propose; one at least."""
        taps = self._target.cache.taps
        if self._read is None or taps is None:
            return 0
        start, stop = self._read.rows(context.tokens, taps)
        return stop - start

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        taps = self._target.cache.taps
        return 0 if self._read is None or taps is None else self._read.cached_after(context.tokens, taps)

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen."""
        return parallel_evidence(context)

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """One call drafts them all, but no path is longer than the block, whatever that would cost."""
        return 1.0 if tokens <= self._tokens else math.inf

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A tree or a chain of what the head finds likely in the places behind ``prefix``.

        A head that breaks down costs speed, never the text: where its logits leave no token (NaN), the proposal ends,
        and where ONNX Runtime fails, it is given up. Hidden states that are not there mean no proposal.
        """
        taps, read, head = self._target.cache.taps, self._read, self._network
        if read is None or head is None or taps is None or budget.tokens <= 0 or not budget.another(()):
            return Proposal()
        start, stop = read.rows(context.tokens, taps)
        wanted = min(budget.tokens, _HOPE * max(1.0, budget.ahead(())))
        places = min(len(prefix) + int(wanted), head.tokens)
        if start == stop or len(prefix) >= places:
            return Proposal()
        self._make_room(read, head.slots(read.cached_after(context.tokens, taps)))
        past, started = read.cache.length, self._clock()
        try:
            logits, scores = read.draft(context.tokens, taps, places)
        except ProviderError as error:
            self._give_up(error)
            return Proposal()
        self._on_call(stop - start, past, self._clock() - started)
        if head.markov is None and scores is None:
            return propose_places(context, prefix, logits, budget)
        return propose_block(context, prefix, logits, scores, head.markov, budget)

    def _begin(self, network: BlockHead, cache: KVCache) -> BlockReading:
        return BlockReading(network, self._window, cache)

    def _key(self, context: Context) -> object:
        return self._target.cache
