"""The target's caches: one for each text that may go on, as many as the memory plan has room for."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from edge_spec.errors import RequestError
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model


class CachedText:
    """A text, or its beginning, whose keys and values a cache holds.

    Attributes:
        cache: the cache.
        tokens: what lies in it; as many as ``cache.length``.
        removed: whether nobody will continue it.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.removed = False

    def begin(self, tokens: Sequence[int]) -> int:
        """Keep what another text has in common with this one, and return how many tokens that is.

        The new text's last token is never kept: a call has to have something to say.
        """
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = next((index for index, (old, new) in enumerate(pairs) if old != new), None)
        if common is None:
            common = min(len(self.tokens), len(tokens) - 1)
        self.cache.rollback(common)
        del self.tokens[common:]
        return common

    def end(self, tokens: Sequence[int]) -> None:
        """Note what the cache holds after a generation: the beginning of ``tokens``, and no more than that."""
        self.cache.rollback(min(self.cache.length, len(tokens)))
        self.tokens = list(tokens[: self.cache.length])


class CachePool:
    """All texts of an engine. Where there is no room for another, those not used for longest lose their cache.

    What is evicted is not lost: the text is known to whoever continues it, and read again. Keys and values do not
    depend on how a text was divided into calls, so it goes on as if nothing had happened (docs/exactness.md).

    One text at a time is in use; any thread may add and remove others meanwhile.
    """

    def __init__(self, model: Model, slots: int) -> None:
        """Start without texts.

        Args:
            model: whose caches they are.
            slots: most slots of all caches together; at least those of one whole context.
        """
        self._model = model
        self._slots = slots
        self._texts: list[CachedText] = []  # those that may hold something; those used last come last
        self._in_use: CachedText | None = None
        self._lock = RLock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the caches of all texts but that in use."""
        with self._lock:
            return sum(text.cache.memory_bytes for text in self._texts if text is not self._in_use)

    def add(self) -> CachedText:
        """An empty text."""
        return CachedText(self._model.new_cache())

    def remove(self, text: CachedText) -> None:
        """Forget a text, once it is no longer in use. Doing so twice does no harm."""
        with self._lock:
            text.removed = True
            if text is not self._in_use:
                self._evict(text)

    def clear(self) -> None:
        """Forget all texts, that in use once it is no longer."""
        with self._lock:
            for text in list(self._texts):
                self.remove(text)

    def use(self, text: CachedText, length: int) -> None:
        """Make a text the model's current one, with room to grow to ``length`` tokens, until :meth:`leave`.

        Raises:
            RequestError: it was removed.
        """
        with self._lock:
            if text.removed:
                raise RequestError("This session is closed; begin another one with engine.session().")
            if text in self._texts:
                self._texts.remove(text)
            self._texts.append(text)
            self._in_use = text
            self._model.use(text.cache)
            wanted = max(text.cache.capacity, text.cache.slots_for(length))
            others = self._texts[:-1]
            while others and wanted + sum(other.cache.capacity for other in others) > self._slots:
                self._evict(others.pop(0))

    def leave(self, text: CachedText) -> None:
        """End a text's use; its cache stays, unless it was removed meanwhile."""
        with self._lock:
            self._in_use = None
            if text.removed:
                self._evict(text)

    def evict_idle(self) -> None:
        """Take the caches of all texts but that in use."""
        with self._lock:
            for text in list(self._texts):
                if text is not self._in_use:
                    self._evict(text)

    def _evict(self, text: CachedText) -> None:
        self._model.shrink(text.cache)
        text.tokens = []
        if text in self._texts:
            self._texts.remove(text)
