"""What the draft model has read of a text, and what of that its cache still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.logit_rows import LogitRows
from edge_spec.runtime.model import Model

# Tokens read at most when the draft is behind: reading a long prompt would take longer than what the draft then saves.
# Qwen2.5-Coder-0.5B agreed with the 1.5B on 66 % of ten answers' tokens if it read 32 tokens of the prompt, 68 % with
# 64, 70 % with 128; only where an answer copies a long prompt does the rest matter much, and there others draft well.
_MOST_UNREAD = 32

# A full cache keeps the first tokens, on which attention rests whatever they say (Xiao et al. 2023, "Efficient
# Streaming Language Models with Attention Sinks"), and the most recent ones, together this share of the window.
_SINKS = 4
_KEPT_SHARE = 0.75


class ReadText:
    """The text a draft model has read, one token after the other, from some place on.

    Where the cache is full, tokens in the middle lose their slots. The others keep the positions they were read at,
    and what is read from then on is told its position, so nothing has to be read again. Graphs that take no positions
    start again instead, a little before the end of the text.

    Attributes:
        cache: the draft's cache, of this text alone.
    """

    def __init__(
        self,
        model: Model,
        window: int,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        cache: KVCache | None = None,
    ) -> None:
        """Begin without text.

        Args:
            model: the draft.
            window: most tokens in the cache, 2 at least.
            on_call: told rows, cached tokens and seconds of every call of the model, and the tokens that it drafted if
                there were several.
            clock: tells the time, in seconds.
            cache: of the draft, which now belongs to this text; by default the one it works on.
        """
        self.cache = model.cache if cache is None else cache
        self._model = model
        self._on_call = on_call
        self._clock = clock
        self._window = min(window, model.context)
        self._first = 0  # where in the text reading began
        self._tokens: list[int] = []  # all that was read from there on
        self._gap = (0, 0)  # from which to which of these tokens the cache holds none
        self.cache.rollback(0)

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return len(self._tokens) - (self._gap[1] - self._gap[0])

    @property
    def columns(self) -> int:
        """How many columns of the model's logits stand for ids."""
        return self._model.columns

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.memory_bytes

    def bytes_beyond(self, window: int) -> int:
        """Bytes of the cache that a window of so many tokens would not need."""
        cache = self.cache
        return max(0, cache.memory_bytes - cache.bytes_of(cache.slots_for(window)))

    def unread(self, text: Sequence[int]) -> int:
        """How many tokens have to be read before the model can say what follows a text."""
        kept = self._kept(text)
        return self._most_unread(text) if kept is None else len(text) - self._first - kept

    def cached_after(self, text: Sequence[int]) -> int:
        """How many tokens the cache will hold once they have been read."""
        kept, unread = self._kept(text), self.unread(text)
        before = 0 if kept is None else self._slots(kept)
        return before + unread if before + unread <= self._window else self._slots_left(unread) + unread

    def catch_up(self, text: Sequence[int]) -> Sequence[int]:
        """Read all of a text but a last narrow step, and return the tokens of that step."""
        kept = self._kept(text)
        if kept is None:
            self.rollback(0)
            self._first, kept = len(text) - self._most_unread(text), 0
        self._cut(kept)
        unseen = text[self._first + kept :]
        self._make_room(len(unseen))
        if len(unseen) > 2:
            self._call(unseen[:-2], ())
        return unseen[-2:]

    def takes(self, rows: int) -> bool:
        """Whether so many more tokens can be read before starting again."""
        if self._model.slides:
            return len(self._tokens) + rows <= self._model.positions
        return self.cached + rows <= self._window

    def step(self, tokens: Sequence[int]) -> LogitRows:
        """Read one or two tokens more and return the logits behind them, one row, valid until the next call."""
        self._make_room(len(tokens))
        return self._call(tokens, (len(tokens) - 1,))

    def takes_chain(self, rows: int, steps: int) -> bool:
        """Whether so many tokens can be read, and as many drafted in the same call, without starting again."""
        # Such a call knows no positions but those that follow the cache.
        return self.cached == len(self._tokens) and self.cached + rows + steps - 1 <= self._window

    def draft(
        self,
        tokens: Sequence[int],
        steps: int,
        noise: Sequence[NDArray[np.float32]] | None,
        inverse_temperature: float,
    ) -> DraftedChain:
        """Read one or two tokens more, and draft those behind them in the same call; see :meth:`Model.draft`."""
        past, started = self.cached, self._clock()
        self._model.use(self.cache)
        try:
            drafted = self._model.draft(tokens, steps, noise, inverse_temperature)
        except BaseException:  # nobody knows what the cache now holds
            self.rollback(0)
            raise
        self._tokens.extend([*tokens, *drafted.tokens[:-1]])
        self._on_call(len(tokens), past, self._clock() - started, steps)
        return drafted

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` of the text on."""
        self._cut(self._usable(min(max(length - self._first, 0), len(self._tokens))))
        if not self._tokens:
            self._first = 0

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens from now on, and give back what the cache has room for beyond them."""
        self._window = min(window, self._model.context)
        if self.cached > self._window:
            if self._model.slides:
                self._evict(self._slots_left(0))
            else:
                self.rollback(0)
        self._model.shrink(self.cache, self._window if self._tokens else 0)

    def _kept(self, text: Sequence[int]) -> int | None:
        """How many of the tokens that were read the cache can go on from towards a text; ``None`` to start again."""
        kept = self._usable(self._agreed(text))
        ahead = len(text) - self._first
        limit = self._model.positions if self._model.slides else self._window
        return kept if 0 < ahead - kept <= self._most_unread(text) and ahead <= limit else None

    def _most_unread(self, text: Sequence[int]) -> int:
        return min(_MOST_UNREAD, self._window - 1, len(text))

    def _agreed(self, text: Sequence[int]) -> int:
        """How many of the tokens the text still has; at most all but its last, which has yet to be answered."""
        tokens, own = self._tokens, text[self._first : -1]
        length = min(len(tokens), len(own))
        if tokens[:length] == own[:length]:
            return length
        return next(index for index in range(length) if tokens[index] != own[index])

    def _usable(self, length: int) -> int:
        """The first ``length`` tokens, or fewer: where none behind the gap are left, those before it."""
        return length if length > self._gap[1] else min(length, self._gap[0])

    def _slots(self, length: int) -> int:
        """How many slots the first ``length`` tokens have."""
        return length if length <= self._gap[0] else length - (self._gap[1] - self._gap[0])

    def _cut(self, length: int) -> None:
        """Forget all but the first ``length`` tokens, whose last is in the cache."""
        self.cache.rollback(self._slots(length))
        del self._tokens[length:]
        if length <= self._gap[0]:
            self._gap = (0, 0)

    def _slots_left(self, rows: int) -> int:
        """How many tokens a full cache keeps to make room for so many more."""
        return min(int(_KEPT_SHARE * self._window), self._window - rows)

    def _make_room(self, rows: int) -> None:
        if self.cached + rows > self._window:
            self._evict(self._slots_left(rows))

    def _evict(self, kept: int) -> None:
        """Keep so many tokens in the cache, the first and the last."""
        start, stop = self._gap
        sinks = min(_SINKS, kept // 2, start if stop else kept)
        recent = kept - sinks
        self.cache.keep(sinks, range(self.cached - recent, self.cached))
        self._gap = (sinks, len(self._tokens) - recent)

    def _call(self, tokens: Sequence[int], logit_rows: Sequence[int]) -> LogitRows:
        past, position = self.cached, len(self._tokens)
        # Without a gap, positions follow the cache.
        positions = range(position, position + len(tokens)) if position > past else None
        started = self._clock()
        self._model.use(self.cache)
        try:
            logits = self._model.forward(tokens, logit_rows, positions)
        except BaseException:  # nobody knows what the cache now holds
            self.rollback(0)
            raise
        self._tokens.extend(tokens)
        self._on_call(len(tokens), past, self._clock() - started)
        return logits
