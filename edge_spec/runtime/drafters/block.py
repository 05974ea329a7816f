"""Drafting with a head that fills a block at once from the target's hidden states: DFlash and DSpark."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

from edge_spec.errors import ProviderError, RequestError
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.block_choice import propose_block
from edge_spec.runtime.drafters.parallel_choice import parallel_evidence, propose_places
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.drafters.read_block import BlockReading
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence, Proposal

_LOG = logging.getLogger(__name__)

# A token to read, and the one behind it.
LEAST_WINDOW = 2

# How many places more than are expected to be worth it are looked at, since of each some turn out better than usual.
_HOPE = 2


class BlockDrafter:
    """Lets a head fill in the places behind the text's last token, which it sees beside the target's hidden states.

    Where tokens are proposed already, their places are left out; the others are as they were. The head may be given up
    where memory is short, and loaded again later. Meanwhile nothing is proposed.
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
        self._window = _checked(head.context if window is None else window)
        self._tokens = head.tokens
        self._target = target
        self._on_call = on_call
        self._clock = clock
        self._load = load
        self._readings: WeakKeyDictionary[Context, BlockReading] = WeakKeyDictionary()
        self._head: BlockHead | None = head
        self._reading: BlockReading | None = BlockReading(head, self._window)

    @property
    def ready(self) -> bool:
        """Whether the head is there."""
        return self._head is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of its caches."""
        return sum(reading.memory_bytes for reading in (*self._others(), self._reading) if reading is not None)

    @property
    def window(self) -> int:
        """Most tokens in the cache of a text, and about as many in those of all texts together."""
        return self._window

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many hidden states it has to read before it can propose; one at least."""
        taps = self._target.cache.taps
        if self._reading is None or taps is None:
            return 0
        start, stop = self._reading.rows(context.tokens, taps)
        return stop - start

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        taps = self._target.cache.taps
        return 0 if self._reading is None or taps is None else self._reading.cached_after(context.tokens, taps)

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
        taps, reading, head = self._target.cache.taps, self._reading, self._head
        if reading is None or head is None or taps is None or budget.tokens <= 0 or not budget.another(()):
            return Proposal()
        start, stop = reading.rows(context.tokens, taps)
        wanted = min(budget.tokens, _HOPE * max(1.0, budget.ahead(())))
        places = min(len(prefix) + int(wanted), head.tokens)
        if start == stop or len(prefix) >= places:
            return Proposal()
        self._make_room(reading, head.slots(reading.cached_after(context.tokens, taps)))
        past, started = reading.cache.length, self._clock()
        try:
            logits, scores = reading.draft(context.tokens, taps, places)
        except ProviderError as error:
            _LOG.warning("the head is given up: %s", error)
            self.unload()
            return Proposal()
        self._on_call(stop - start, past, self._clock() - started)
        if head.markov is None and scores is None:
            return propose_places(context, prefix, logits, budget)
        return propose_block(context, prefix, logits, scores, head.markov, budget)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` on."""
        if self._reading is not None:
            self._reading.rollback(length)

    def switch(self, context: Context) -> None:
        """Go on with this text. What was read of others is kept as long as the window has room for all of them."""
        if self._head is None:
            return
        reading = self._readings.pop(context, None)
        if reading is None:
            unused = self._reading is not None and self._reading not in self._readings.values()
            reading = self._reading if unused and self._reading else BlockReading(self._head, self._window)
            reading.rollback(0)
        self._readings[context] = self._reading = reading

    def bytes_beyond(self, window: int) -> int:
        """Bytes that :meth:`narrow` would give back."""
        others = sum(other.memory_bytes for other in self._others())
        return 0 if self._reading is None else others + self._reading.bytes_beyond(window)

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens in the cache from now on, and give back the memory of the others.

        A window wider than before lets the cache grow again. Raises RequestError if it is too small.
        """
        self._window = _checked(window)
        if self._reading is not None:
            for other in self._others():
                self._forget(other)
            self._reading.narrow(window)

    def unload(self) -> None:
        """Give the head up, and so its memory. Doing so twice does no harm."""
        self._head = self._reading = None
        self._readings.clear()

    def reload(self) -> None:
        """Load the head again if it was given up; it has then read nothing.

        Raises:
            RequestError: nobody said how to load it.
            Exception: whatever loading raises; the head is then still away.
        """
        if self._head is not None:
            return
        if self._load is None:
            raise RequestError("The head cannot come back; give its drafter a function that loads it.")
        head = self._load()
        self._head, self._reading = head, BlockReading(head, self._window)

    def _others(self) -> list[BlockReading]:
        """What was read of texts that have not the turn, those longest without one first."""
        return [other for other in list(self._readings.values()) if other is not self._reading]

    def _make_room(self, reading: BlockReading, slots: int) -> None:
        """Take caches of other texts, if they and one for so many slots are more than one whole window."""
        others, cache = self._others(), reading.cache
        room = cache.slots_for(self._window) - max(cache.capacity, cache.slots_for(slots))
        while others and sum(other.cache.capacity for other in others) > room:
            self._forget(others.pop(0))

    def _forget(self, reading: BlockReading) -> None:
        for context, other in list(self._readings.items()):
            if other is reading:
                del self._readings[context]
        reading.cache.shrink()


def _checked(window: int) -> int:
    if window < LEAST_WINDOW:
        raise RequestError(f"The head's window is {window} tokens, expected at least {LEAST_WINDOW}.")
    return window
