"""Gives memory back while the system is short of it, and takes it again when it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

_LOG = logging.getLogger(__name__)

# Seconds between two looks at the free memory, and for how long it must have been enough before anything comes back.
_INTERVAL = 0.1
_PATIENCE = 2.0
# Free memory that what comes back must leave, as a multiple of the reserve, lest it go again at once.
_ROOM = 1.5
# The reserve where nobody says: this share of all memory, within bounds.
_RESERVE_SHARE = 0.05
_LEAST_RESERVE, _USUAL_RESERVE, _MOST_RESERVE = 8 << 20, 32 << 20, 512 << 20


@dataclass(frozen=True)
class Sheddable:
    """Something that speeds up generation, and that it can go on without.

    Attributes:
        name: what events call it.
        memory_bytes: tells what giving it up would give back now; 0 if it has been given up.
        shed: gives it up.
        cost_bytes: tells what taking it back would take; 0 if nothing of it is missing.
        admit: takes it back.
        pays: told how many tokens the text may still grow by, whether taking it back is worth its time.
        place: ``"device"`` if its memory is a GPU's.
    """

    name: str
    memory_bytes: Callable[[], int]
    shed: Callable[[], None]
    cost_bytes: Callable[[], int] = lambda: 0
    admit: Callable[[], None] = lambda: None
    pays: Callable[[int], bool] = lambda tokens: True
    place: Literal["host", "device"] = "host"


@dataclass(frozen=True)
class MemoryEvent:
    """Something was given up for want of memory, or taken back.

    Attributes:
        action: which of the two.
        part: what it was.
        memory_bytes: its size.
        available_bytes: memory that was free before.
        position: tokens of the text at that time, prompt included.
    """

    action: Literal["shed", "admitted"]
    part: str
    memory_bytes: int
    available_bytes: int
    position: int


class MemoryPressure:
    """Watches free memory between rounds.

    What is given up changes the speed, never the text: drafters only propose, and a conversation that has lost its
    cache is read again.
    """

    def __init__(
        self,
        parts: Sequence[Sheddable],
        available: Callable[[], int | None],
        reserve: int,
        give_back: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Watch.

        Args:
            parts: what can be given up, in this order; it comes back in the reverse order.
            available: tells the bytes that are free, ``None`` if that is unknown.
            reserve: bytes that should stay free.
            give_back: called after something was given up, to hand freed memory to the system.
            clock: tells the time, in seconds.
        """
        self._parts = parts
        self._available = available
        self._reserve = reserve
        self._give_back = give_back
        self._clock = clock
        self._looked = float("-inf")
        self._short = float("-inf")  # when memory was last found short
        self._has_shed = False

    def check(self, position: int, remaining: int) -> Sequence[MemoryEvent]:
        """Look at the free memory, unless that was done a moment ago, and act.

        Args:
            position: tokens of the current text.
            remaining: tokens it may still grow by.

        Returns:
            What was done.
        """
        now = self._clock()
        if now - self._looked < _INTERVAL:
            return ()
        self._looked = now
        available = self._available()
        if available is None:
            return ()
        if available < self._reserve:
            self._short = now
            return self._shed(available, position)
        if self._has_shed and now - self._short >= _PATIENCE:
            return self._admit(available, position, remaining)
        return ()

    def _shed(self, available: int, position: int) -> Sequence[MemoryEvent]:
        """Give up one part after the other until there is enough, or nothing left to give."""
        events = []
        for part in self._parts:
            size = part.memory_bytes()
            if size == 0:
                continue
            part.shed()
            self._give_back()
            self._has_shed = True
            events.append(_event("shed", part, size, available, position))
            found = self._available()
            if found is None or found >= self._reserve:
                break
            available = found
        return events

    def _admit(self, available: int, position: int, remaining: int) -> Sequence[MemoryEvent]:
        """Take back what was given up last of what there is room for, and that pays."""
        missing = [part for part in self._parts if part.cost_bytes()]
        self._has_shed = bool(missing)
        for part in reversed(missing):
            size = part.cost_bytes()
            if available - size >= _ROOM * self._reserve and part.pays(remaining):
                try:
                    part.admit()
                except Exception as error:  # whatever loading raises; the text goes on without it
                    _LOG.warning("the %s does not come back: %s", part.name, error)
                    self._short = self._looked
                    return ()
                return [_event("admitted", part, size, available, position)]
        return ()


def usual_reserve(total: int | None, planned: int | None = None) -> int:
    """Bytes that should stay free.

    Args:
        total: all memory there is; ``None``: nobody knows.
        planned: what will be free when everything that was planned is in use. Where that is little, no more than half
            of it is asked for: what was planned is no reason to give anything up.
    """
    reserve = min(max(int(_RESERVE_SHARE * (total or 0)), _USUAL_RESERVE), _MOST_RESERVE)
    return reserve if planned is None else max(min(reserve, planned // 2), _LEAST_RESERVE)


def _event(
    action: Literal["shed", "admitted"], part: Sheddable, size: int, available: int, position: int
) -> MemoryEvent:
    _LOG.warning(
        "%s the %s (%.0f MiB) at token %d: %.0f MiB were free",
        "gave up" if action == "shed" else "took back",
        part.name,
        size / 2**20,
        position,
        available / 2**20,
    )
    return MemoryEvent(action, part.name, size, available, position)
