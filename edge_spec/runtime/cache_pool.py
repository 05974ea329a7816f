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
        tokens: what lay in it when the last generation ended; as many as ``cache.length`` then.
        in_use: whether a generation is continuing it.
        removed: whether nobody else will continue it.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.in_use = False
        self.removed = False

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens another text has in common with this one.

        The other text's last token is never counted: a call has to have something to say.
        """
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        differs = next((index for index, (old, new) in enumerate(pairs) if old != new), None)
        return min(len(self.tokens), len(tokens) - 1) if differs is None else differs

    def keep_common(self, tokens: Sequence[int]) -> int:
        """Keep what another text has in common with this one, and return how many tokens that is."""
        common = self.common(tokens)
        self.cache.rollback(common)
        del self.tokens[common:]
        return common

    def settle(self, tokens: Sequence[int]) -> None:
        """Note what the cache holds after a generation: the beginning of ``tokens``, and no more than that."""
        self.cache.rollback(min(self.cache.length, len(tokens)))
        self.tokens = list(tokens[: self.cache.length])


class CachePool:
    """All texts of an engine. Where there is no room for another, those not used for longest lose their cache.

    What is evicted is not lost: the text is known to whoever continues it, and read again. Keys and values do not
    depend on how a text was divided into calls, so it goes on as if nothing had happened (docs/exactness.md).

    Several texts may be in use, and one of them at a time is the model's. Any thread may add and remove texts.
    """

    def __init__(self, model: Model, slots: int) -> None:
        """Start without texts.

        Args:
            model: whose caches they are.
            slots: most slots of all caches together; at least those of one whole context.
        """
        self.slots = slots
        self._model = model
        self._texts: list[CachedText] = []  # those that may hold something; those used last come last
        self._own: list[CachedText] = []  # of them, and others, those that belong to no session
        self._lock = RLock()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        with self._lock:
            return sum(text.cache.memory_bytes for text in self._texts)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the caches of all texts that are not in use."""
        with self._lock:
            return sum(text.cache.memory_bytes for text in self._texts if not text.in_use)

    @property
    def tap_bytes(self) -> int:
        """Bytes of the hidden states that are kept for a head, of all texts."""
        with self._lock:
            return sum(text.cache.taps.memory_bytes for text in self._texts if text.cache.taps is not None)

    def give_back_taps(self) -> None:
        """Forget the hidden states of all texts. What the caches hold stays."""
        with self._lock:
            for text in self._texts:
                if text.cache.taps is not None:
                    text.cache.taps.give_back()

    def add(self) -> CachedText:
        """An empty text, for a session."""
        return CachedText(self._model.new_cache())

    def begin(self, tokens: Sequence[int], length: int, text: CachedText | None = None) -> CachedText:
        """Begin a generation, until :meth:`end`.

        Args:
            tokens: the prompt.
            length: most tokens of prompt and output together.
            text: the session's; ``None`` for one without a session, which continues a text of its like if it can.

        Returns:
            The text to continue, now in use. Not that of the session if it is in use already.

        Raises:
            RequestError: the session was closed.
        """
        with self._lock:
            if text is not None and text.removed:
                raise RequestError("This session is closed; begin another one with engine.session().")
            if text is None:
                text = self._continued(tokens, length)
            elif text.in_use:
                text = self.add()
                text.removed = True  # gone when it ends
            text.in_use = True
            return text

    def end(self, text: CachedText) -> None:
        """End a generation; the cache stays, unless the text was removed meanwhile."""
        with self._lock:
            text.in_use = False
            if text.removed or not text.tokens:  # nobody could go on from nothing
                self._evict(text)

    def use(self, text: CachedText, length: int) -> None:
        """Make a text the model's current one, with room to grow to ``length`` tokens."""
        with self._lock:
            if text in self._texts:
                self._texts.remove(text)
            self._texts.append(text)
            self._model.use(text.cache)
            wanted = max(text.cache.capacity, text.cache.slots_for(length))
            others = sorted(self._texts[:-1], key=lambda other: other.in_use)  # stable: idle ones first, oldest first
            while others and wanted + sum(other.cache.capacity for other in others) > self.slots:
                self._evict(others.pop(0))
            for other in others:
                if other.cache.taps is not None:
                    other.cache.taps.trim()

    def remove(self, text: CachedText) -> None:
        """Forget a text, once it is no longer in use. Doing so twice does no harm."""
        with self._lock:
            text.removed = True
            if not text.in_use:
                self._evict(text)

    def clear(self) -> None:
        """Forget all texts, those in use once they are no longer."""
        with self._lock:
            for text in list(self._texts):
                self.remove(text)

    def evict_idle(self) -> None:
        """Take the caches of all texts that are not in use."""
        with self._lock:
            for text in list(self._texts):
                if not text.in_use:
                    self._evict(text)

    def _continued(self, tokens: Sequence[int], length: int) -> CachedText:
        """The text without a session that a prompt goes on from, or a new one.

        That is the idle one with most in common. If less than half of it is, somebody may yet go on with the rest, so
        where there is room the new text gets a copy of what they share, such as a system message.
        """
        idle = [text for text in self._own if not text.in_use and text.tokens]
        best = max(idle, key=lambda text: text.common(tokens), default=None)
        shared = 0 if best is None else best.common(tokens)
        if best is not None and 2 * shared >= len(best.tokens):
            return best
        new = self.add()
        if best is not None and shared:
            has_room = new.cache.slots_for(length) + sum(text.cache.capacity for text in self._texts) <= self.slots
            if not has_room or not new.cache.copy(best.cache, shared):
                return best
            new.tokens = best.tokens[:shared]
            self._texts.append(new)
        self._own.append(new)
        return new

    def _evict(self, text: CachedText) -> None:
        self._model.shrink(text.cache)
        text.tokens = []
        if text in self._texts:
            self._texts.remove(text)
        if text in self._own and not text.in_use:
            self._own.remove(text)
