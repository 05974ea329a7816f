"""What a drafter's network is, and what it has read of a text: all that drafting asks of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.logit_rows import LogitRows


class Network(Protocol):
    """A network that continues texts, each with a cache of its own.

    Attributes:
        cache: that of the text it works on.
    """

    cache: KVCache

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        ...

    def new_cache(self) -> KVCache:
        """An empty cache for another text."""
        ...

    def shrink(self, cache: KVCache, slots: int = 0) -> None:
        """Give back what a cache does not need for so many tokens; those behind them are forgotten."""
        ...


class Reading(Protocol):
    """What a network has read of a text. It grows by what is read, and what is no longer the text is rolled back."""

    @property
    def cache(self) -> KVCache:
        """That of this text alone."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache."""
        ...

    def bytes_beyond(self, window: int) -> int:
        """Bytes of the cache that a window of so many tokens would not need."""
        ...

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` of the text on."""
        ...

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens from now on, and give back what the cache has room for beyond them."""
        ...


class ChainReading(Reading, Protocol):
    """The same of a network that says one token after the other."""

    def unread(self, text: Sequence[int]) -> int:
        """How many tokens have to be read before the network can say what follows a text."""
        ...

    def cached_after(self, text: Sequence[int]) -> int:
        """How many tokens the cache will hold once they have been read."""
        ...

    def catch_up(self, text: Sequence[int]) -> Sequence[int]:
        """Read all of a text but a last step, and return the tokens of that step; none if it cannot be read."""
        ...

    def takes(self, rows: int) -> bool:
        """Whether so many more tokens can be read before starting again."""
        ...

    def step(self, tokens: Sequence[int]) -> LogitRows:
        """Read tokens that follow, and return the logits behind them, one row, valid until the next call."""
        ...
