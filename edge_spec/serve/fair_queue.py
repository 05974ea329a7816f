"""Who may go to the engine next: clients take turns, and each client's requests go in the order in which they came."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

# Weight of the latest request in the average time that one takes.
_LATEST = 0.2
_FIRST_GUESS_SECONDS = 5.0
_LONGEST_WAIT_SECONDS = 600


class QueueFullError(Exception):
    """There is no place left.

    Attributes:
        retry_after: seconds until there may be one, judged by how long requests have taken.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class Place:
    """A request's place.

    Attributes:
        client: whose request it is.
        cancelled: set once nobody wants the answer any more.
        running: whether it has its turn.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.cancelled = threading.Event()
        self.running = False
        self.began: float | None = None
        self.turn: asyncio.Future[None] | None = None


class FairQueue:
    """Places in front of the engine, a bounded number. Belongs to the thread of one event loop.

    A client is whoever brings the same key from the same address. However many requests one of them sends, the next
    client waits for one of these at most.
    """

    def __init__(self, slots: int, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            slots: how many requests run at once.
            limit: how many may wait besides.
            clock: tells the time, in seconds.
        """
        self.slots, self.limit = slots, limit
        self._clock = clock
        self._places: set[Place] = set()
        self._running = 0
        self._lines: OrderedDict[str, deque[Place]] = OrderedDict()  # whose turn is next comes first
        self._seconds = _FIRST_GUESS_SECONDS

    @property
    def running(self) -> int:
        """Requests that have their turn."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that have a place and wait."""
        return len(self._places) - self._running

    def enter(self, client: str) -> Place:
        """Take a place. Raises QueueFullError if there is none."""
        if len(self._places) >= self.slots + self.limit:
            raise QueueFullError(self._retry_after())
        place = Place(client)
        self._places.add(place)
        return place

    async def wait(self, place: Place) -> bool:
        """Wait for the place's turn, which lasts until it leaves. Returns whether it came; not if it was cancelled."""
        if place.cancelled.is_set():
            return False
        place.turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(place.client, deque()).append(place)
        self._hand_out()
        try:
            await place.turn
        except asyncio.CancelledError:
            if not place.cancelled.is_set():
                raise
        return place.running

    def cancel(self, place: Place) -> None:
        """Say that nobody wants the answer any more: it ends if it runs, and waits no longer if it waits."""
        place.cancelled.set()
        self._step_out(place)
        if place.turn is not None and not place.turn.done():
            place.turn.cancel()

    def leave(self, place: Place) -> None:
        """Give the place back; leaving twice does no harm."""
        if place not in self._places:
            return
        self._places.remove(place)
        self._step_out(place)
        if place.running:
            place.running = False
            self._running -= 1
            if place.began is not None and not place.cancelled.is_set():
                self._seconds += _LATEST * (self._clock() - place.began - self._seconds)
        self._hand_out()

    def _step_out(self, place: Place) -> None:
        line = self._lines.get(place.client)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._lines[place.client]

    def _hand_out(self) -> None:
        while self._running < self.slots and self._lines:
            client, line = next(iter(self._lines.items()))
            place = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            assert place.turn is not None  # who is in a line waits
            place.running, place.began = True, self._clock()
            self._running += 1
            place.turn.set_result(None)

    def _retry_after(self) -> int:
        """Seconds until a place gets free: some request has to end."""
        seconds = math.ceil(self._seconds / self.slots)
        return min(max(seconds, 1), _LONGEST_WAIT_SECONDS)
