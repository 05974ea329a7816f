"""What drafters have in common whose network remembers what it has read of each text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.held_network import HeldNetwork
from edge_spec.runtime.drafters.protocol import Outcome
from edge_spec.runtime.drafters.reading import Network, Reading
from edge_spec.runtime.kv_cache import KVCache

# A token to go on from, and the one behind it.
LEAST_WINDOW = 2

AnyNetwork = TypeVar("AnyNetwork", bound=Network)
AnyReading = TypeVar("AnyReading", bound=Reading)


class NetworkDrafter(HeldNetwork[AnyNetwork], ABC, Generic[AnyNetwork, AnyReading]):
    """Holds a network, and what it has read of each text, with a cache for each of them.

    While the network is away, nothing is proposed.
    """

    def __init__(self, network: AnyNetwork, window: int | None, load: Callable[[], AnyNetwork] | None) -> None:
        """Draft with a network.

        Args:
            network: now belongs to this drafter, with its cache.
            window: most tokens in the cache; ``None`` for all of the network's context.
            load: loads the network again, once it was given up.

        Raises:
            RequestError: the window is too small.
        """
        self._window = self._checked(network.context if window is None else window)
        super().__init__(network, load)
        # By what a text is known by; the latest comes last.
        self._readings: WeakKeyDictionary[Any, AnyReading] = WeakKeyDictionary()
        self._read: AnyReading | None = self._begin(network, network.cache)

    @abstractmethod
    def _begin(self, network: AnyNetwork, cache: KVCache) -> AnyReading:
        """A text of which nothing has been read.

        Args:
            network: reads it.
            cache: of the network, which now belongs to this text.
        """

    @abstractmethod
    def _key(self, context: Context) -> object:
        """What the text is known by, for as long as it may go on."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the KV caches."""
        return sum(read.memory_bytes for read in (*self._others(), self._read) if read is not None)

    @property
    def window(self) -> int:
        """Most tokens in the cache of a text, and about as many in those of all texts together."""
        return self._window

    def bytes_beyond(self, window: int) -> int:
        """Bytes that :meth:`narrow` would give back."""
        others = sum(other.memory_bytes for other in self._others())
        return 0 if self._read is None else others + self._read.bytes_beyond(window)

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens in the cache from now on, and give back the memory of the others.

        A window wider than before lets the cache grow again. Raises RequestError if it is too small.
        """
        self._window = self._checked(window)
        if self._read is not None:
            for other in self._others():
                self._forget(other)
            self._read.narrow(window)

    def unload(self) -> None:
        """Give the network up, and so its memory, unless somebody else holds it too. Doing so twice does no harm."""
        super().unload()
        self._read = None
        self._readings.clear()

    def reload(self) -> None:
        """Load the network again if it was given up; it has then read nothing. Raises as for any held network."""
        super().reload()
        if self._read is None and self._network is not None:
            self._read = self._begin(self._network, self._network.cache)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` on."""
        if self._read is not None:
            self._read.rollback(length)

    def switch(self, context: Context) -> None:
        """Go on with this text. What was read of others is kept as long as the window has room for all of them."""
        if self._network is None:
            return
        key = self._key(context)
        read = self._readings.pop(key, None)
        if read is None:
            free = all(other.cache is not self._network.cache for other in self._readings.values())
            read = self._begin(self._network, self._network.cache if free else self._network.new_cache())
        self._readings[key] = self._read = read

    def _make_room(self, read: AnyReading, slots: int) -> None:
        """Take caches of other texts, if they and one with so many slots are more than one whole window."""
        others = self._others()
        if not others:
            return
        room = read.cache.slots_for(self._window) - max(read.cache.capacity, read.cache.slots_for(slots))
        while others and sum(other.cache.capacity for other in others) > room:
            self._forget(others.pop(0))

    def _others(self) -> list[AnyReading]:
        """What was read of texts that have not the turn, those longest without one first."""
        return [other for other in list(self._readings.values()) if other is not self._read]

    def _forget(self, read: AnyReading) -> None:
        for key, other in list(self._readings.items()):
            if other is read:
                del self._readings[key]
        if self._network is not None:
            self._network.shrink(read.cache)

    def _checked(self, window: int) -> int:
        if window < LEAST_WINDOW:
            raise RequestError(f"The {self._called}'s window is {window} tokens, expected at least {LEAST_WINDOW}.")
        return window
