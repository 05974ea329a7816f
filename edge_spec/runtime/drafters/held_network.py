"""What drafters with a network of their own have in common: it can be given up, and loaded again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from edge_spec.errors import RequestError

_LOG = logging.getLogger(__name__)

Held = TypeVar("Held")


class HeldNetwork(Generic[Held]):
    """A network that is given up where memory is short or it fails, and may come back. Meanwhile it is away."""

    name: str

    def __init__(self, network: Held, load: Callable[[], Held] | None) -> None:
        """Hold a network.

        Args:
            network: now belongs to this drafter.
            load: loads it again, once it was given up.
        """
        self._network: Held | None = network
        self._load = load

    @property
    def ready(self) -> bool:
        """Whether the network is there."""
        return self._network is not None

    def unload(self) -> None:
        """Give the network up, and so its memory, unless somebody else holds it too. Doing so twice does no harm."""
        self._network = None

    def reload(self) -> None:
        """Load the network again if it was given up.

        Raises:
            RequestError: nobody said how to load it.
            Exception: whatever loading raises; the network is then still away.
        """
        if self.ready:
            return
        if self._load is None:
            raise RequestError(f"The {self._called} cannot come back; give its drafter a function that loads it.")
        self._network = self._load()

    @property
    def _called(self) -> str:
        """What messages call the network."""
        return "draft model" if self.name == "model" else self.name

    def _give_up(self, error: Exception) -> None:
        """Go on without a network that has failed: it costs speed, never the text."""
        _LOG.warning("the %s is given up: %s", self._called, error)
        self.unload()
