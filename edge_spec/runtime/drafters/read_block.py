"""What a head that drafts a block at once has read of a text, and what of that its cache still holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.tap_rows import TapRows

# Hidden states that a call reads at most. Each of them is as wide as all taps together, and the memory plan counts on
# calls about as large as those that read a prompt.
MOST_ROWS = 128
# Where a cache is full, this share of the window is kept, the most recent tokens.
_KEPT_SHARE = 0.75


class BlockReading:
    """The tokens of one text whose features are in a cache.

    Positions count from where reading began, whatever was dropped since. Rows of hidden states that are gone before
    they were read, as those at the beginning of a long prompt may be, leave a gap that the cache begins behind.

    Attributes:
        cache: of this text alone.
    """

    def __init__(self, head: BlockHead, window: int, cache: KVCache | None = None) -> None:
        """Begin without text.

        Args:
            head: the head.
            window: most tokens in the cache.
            cache: of the head, which now belongs to this text; by default the one it worked on last.
        """
        self.cache = head.cache if cache is None else cache
        self._head = head
        self._window = min(window, head.context)
        self._tokens: list[int] = []  # of the text, as far as it was read
        self._origin = 0  # where in the text positions begin
        self.cache.rollback(0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.memory_bytes

    def bytes_beyond(self, window: int) -> int:
        """Bytes of the cache that a window of so many tokens would not need."""
        cache = self.cache
        return max(0, cache.memory_bytes - cache.bytes_of(cache.slots_for(self._head.slots(window))))

    def rows(self, text: Sequence[int], taps: TapRows) -> tuple[int, int]:
        """Which hidden states are to be read before a block behind the text: from which token to which.

        All that are there and were not read, but the latest one at least. An empty range, if they do not reach to the
        token before the text's last.
        """
        stop = len(text) - 1
        if taps.stop != stop or taps.start >= stop:
            return stop, stop
        start = min(self._agreed(text), stop - 1)
        if start < taps.start or not self._holds(start):
            start = taps.start
        return max(start, stop - self._window), stop

    def cached_after(self, text: Sequence[int], taps: TapRows) -> int:
        """How many tokens the cache will hold once they have been read."""
        start, stop = self.rows(text, taps)
        before = self._slots(start) if self._goes_on(text, start) else 0
        return min(before + stop - start, self._window)

    def draft(
        self, text: Sequence[int], taps: TapRows, places: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Read what is to be read, and draft behind the text; see :meth:`BlockHead.draft`."""
        start, stop = self.rows(text, taps)
        if not self._goes_on(text, start) or stop - self._origin > self._head.context:
            self._begin_at(start)
        self._cut(start)
        self._make_room(stop - start)
        ends = [*range(start + MOST_ROWS, stop, MOST_ROWS), stop]
        try:
            for first, last in zip((start, *ends), ends, strict=False):
                wanted = places if last == stop else 1  # all but the last call only read
                rows, position = taps.read(first, last), first - self._origin
                drafted = self._head.draft(self.cache, rows, position, text[last], wanted)
        except BaseException:  # nobody knows what the cache now holds
            self._begin_at(0)
            raise
        self._tokens = list(text[:stop])
        taps.release(stop - 1)  # the last one begins the next block, if that comes before another token
        return drafted

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` of the text on."""
        if length >= len(self._tokens):
            return
        if self._holds(length):
            self._cut(length)
        else:
            self._begin_at(0)

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens from now on, and give back what the cache has room for beyond them."""
        self._window = min(window, self._head.context)
        self._keep_recent(self._window)
        self.cache.shrink(self._head.slots(self._window) if self.cache.length else 0)

    def _agreed(self, text: Sequence[int]) -> int:
        """How many of the tokens that were read the text still has, from its first on."""
        length = min(len(self._tokens), len(text))
        if self._tokens[:length] == text[:length]:
            return length
        return next(index for index in range(length) if self._tokens[index] != text[index])

    def _goes_on(self, text: Sequence[int], start: int) -> bool:
        """Whether reading can go on from token ``start``: what is cached of those before it is still the text."""
        return start <= self._agreed(text) and self._holds(start)

    def _holds(self, length: int) -> bool:
        """Whether the cache can go on behind the first ``length`` tokens of the text."""
        return 0 <= self._slots(length) <= self.cache.length

    def _slots(self, length: int) -> int:
        """How many of the first ``length`` tokens are in the cache, which holds the last ones that were read."""
        return length - (len(self._tokens) - self.cache.length)

    def _begin_at(self, start: int) -> None:
        self.cache.rollback(0)
        self._tokens, self._origin = [], start

    def _cut(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        if self._tokens:
            self.cache.rollback(self._slots(length))
            del self._tokens[length:]

    def _make_room(self, rows: int) -> None:
        if self.cache.length + rows > self._window:
            self._keep_recent(min(int(_KEPT_SHARE * self._window), self._window - rows))

    def _keep_recent(self, count: int) -> None:
        """Drop the cache's first tokens, if it holds more."""
        length = self.cache.length
        if length > count and self._head.moves_slots:
            self.cache.keep(0, range(length - count, length))
        elif length > count:
            self.cache.rollback(0)
