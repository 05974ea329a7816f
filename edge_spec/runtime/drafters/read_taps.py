"""What a recurrent head has read of a text: hidden states of the target, and behind them features of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.head_model import HEAD_ROWS, HeadModel
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from edge_spec.runtime.tap_rows import KEPT_TAP_ROWS, TapRows

# Hidden states read at most when the head is behind. A row costs the head about what it costs one layer of the target.
_MOST_UNREAD = 128
# Share of a window that reading may fill when it begins again.
_FILLED_SHARE = 0.75


class ReadTaps:
    """The rows that a head has read, one after the other, from some token of the text on.

    Row p is the pair of the hidden state of token p and the id of token p + 1. Of a text of n tokens whose last is
    pending, the target has told the hidden states of tokens 0 to n - 2. Rows behind those have the head's own feature
    of the row before in place of a hidden state. When the target has told more, they are read again with what is true.

    What was read is compared with the text, so it does not matter how a text came to be what it is. If hidden states
    are missing that were to be read next, since nobody had read them for long or the text was cut far from its end,
    reading begins again with the first that there is.

    Attributes:
        cache: the head's cache, of this text alone.
    """

    def __init__(
        self,
        model: HeadModel,
        window: int,
        target: Model,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        cache: KVCache | None = None,
    ) -> None:
        """Begin without text.

        Args:
            model: the head.
            window: most rows in the cache, 2 at least.
            target: whoever has the turn, its cache is that of this text, and keeps hidden states.
            on_call: told rows, cached rows and seconds of every call of the head.
            clock: tells the time, in seconds.
            cache: of the head, which now belongs to this text; by default the one it works on.
        """
        self.cache = model.cache if cache is None else cache
        self._model = model
        self._target = target
        self._on_call = on_call
        self._clock = clock
        self._window = min(window, model.context)
        self._first = 0  # the token whose hidden state was read first
        # The text up to the id of the last row: what the target has told of a token depends on all before it.
        self._tokens: list[int] = []
        self._told = 0  # how many of the rows, from the first, have true hidden states
        self._feature: NDArray[Any] | None = None  # what the head says of the token behind the last row
        self.cache.rollback(0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.memory_bytes

    def bytes_beyond(self, window: int) -> int:
        """Bytes of the cache that a window of so many rows would not need."""
        cache = self.cache
        return max(0, cache.memory_bytes - cache.bytes_of(cache.slots_for(window)))

    def unread(self, text: Sequence[int]) -> int:
        """How many rows have to be read before the head can say what follows a text."""
        first, kept = self._start(text)
        return max(1, len(text) - 1 - first - kept)

    def cached_after(self, text: Sequence[int]) -> int:
        """How many rows the cache will hold once they have been read."""
        return max(1, len(text) - 1 - self._start(text)[0])

    def catch_up(self, text: Sequence[int]) -> Sequence[int]:
        """Read all of a text but a last call, and return the ids of its rows; none if nothing can be read.

        Tokens at the end of the text that the target has not read are read with the head's own features, one by one.
        """
        first, kept = self._start(text)
        self._cut(kept)
        if kept == 0:
            self._first, self._tokens = first, list(text[: first + 1])
        told = self._told_of(text)
        if first >= told or len(text) - 1 - first > self._window:
            return ()
        pending = text[first + kept + 1 : told + 1]
        while len(pending) > HEAD_ROWS:
            self._call(pending[:HEAD_ROWS], ())
            pending = pending[HEAD_ROWS:]
        for token in text[told + 1 :]:
            self.step(pending)
            pending = (token,)
        return pending

    def takes(self, rows: int) -> bool:
        """Whether so many more rows can be read before beginning again."""
        return self.cache.length + rows <= self._window

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Read rows that end with these ids, and return the logits of the last, float32 [1, columns].

        They have the hidden states that the target has told, or if it has not told any more, the head's own feature,
        which there is of one row. Valid until the next call.
        """
        return self._call(tokens, (len(tokens) - 1,))

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` of the text on."""
        self._cut(min(max(length - 1 - self._first, 0), self.cache.length))

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` rows from now on, and give back what the cache has room for beyond them."""
        self._window = min(window, self._model.context)
        if self.cache.length > self._window:
            self.rollback(0)
        self._model.shrink(self.cache, self._window if self.cache.length else 0)

    @property
    def _taps(self) -> TapRows:
        taps = self._target.cache.taps
        assert taps is not None  # the target was loaded for a head
        return taps

    def _told_of(self, text: Sequence[int]) -> int:
        """How many of a text's tokens, from the first, have a hidden state that can be paired with the next token."""
        return min(self._taps.stop, len(text) - 1)

    def _start(self, text: Sequence[int]) -> tuple[int, int]:
        """With which hidden state the rows of a text begin, and how many of them need not be read again."""
        told, rows = self._told_of(text), len(text) - 1 - self._first
        # One row is read in any case, for what it says.
        kept = min(self._agreed(text), self._told, told - 1 - self._first)
        missing = self._first + kept < self._taps.start
        if kept >= 0 and not missing and told - self._first - kept <= _MOST_UNREAD and rows <= self._window:
            return self._first, kept
        own = len(text) - 1 - told
        most = min(_MOST_UNREAD, max(1, int(_FILLED_SHARE * self._window) - own))
        return max(self._taps.start, told - most), 0

    def _agreed(self, text: Sequence[int]) -> int:
        """How many of the rows the text still has."""
        tokens = self._tokens
        length = min(len(tokens), len(text))
        if tokens[:length] != text[:length]:
            length = next(index for index in range(length) if tokens[index] != text[index])
        return max(0, length - 1 - self._first)

    def _cut(self, rows: int) -> None:
        """Forget all but the first ``rows`` rows."""
        if rows < self.cache.length:
            self._feature = None
        self.cache.rollback(rows)
        del self._tokens[self._first + 1 + rows :]
        self._told = min(self._told, rows)

    def _call(self, tokens: Sequence[int], logit_rows: Sequence[int]) -> NDArray[np.float32]:
        past = self.cache.length
        start = self._first + past
        is_told = start < self._taps.stop
        started = self._clock()
        self._model.use(self.cache)
        try:
            if is_told:
                stop = start + len(tokens)
                logits, features = self._model.forward(tokens, logit_rows, taps=self._taps.read(start, stop))
            else:
                logits, features = self._model.forward(tokens, logit_rows, features=self._feature)
        except BaseException:  # nobody knows what the cache now holds
            self.rollback(0)
            raise
        self._feature = features.copy() if len(logit_rows) else None
        self._tokens.extend(tokens)
        if is_told:
            self._told = past + len(tokens)
            # Some are left, although they were read: the end of a text may change between two turns of a conversation,
            # and where the window is full, reading begins again with them.
            self._taps.release(self._first + self._told - KEPT_TAP_ROWS)
        self._on_call(len(tokens), past, self._clock() - started)
        return logits
