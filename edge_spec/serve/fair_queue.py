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


class Ticket:
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
        self._tickets: set[Ticket] = set()
        self._running = 0
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()  # whose turn is next comes first
        self._seconds = _FIRST_GUESS_SECONDS

    @property
    def running(self) -> int:
        """Requests that have their turn."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that have a place and wait."""
        return len(self._tickets) - self._running

    def enter(self, client: str) -> Ticket:
        """Take a place. Raises QueueFullError if there is none."""
        if len(self._tickets) >= self.slots + self.limit:
            raise QueueFullError(self._retry_after())
        ticket = Ticket(client)
        self._tickets.add(ticket)
        return ticket

    async def wait(self, ticket: Ticket) -> bool:
        """Wait for the ticket's turn, which lasts until it leaves. Returns whether it came; not if it was cancelled."""
        if ticket.cancelled.is_set():
            return False
        ticket.turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(ticket.client, deque()).append(ticket)
        self._hand_out()
        try:
            await ticket.turn
        except asyncio.CancelledError:
            if not ticket.cancelled.is_set():
                raise
        return ticket.running

    def cancel(self, ticket: Ticket) -> None:
        """Say that nobody wants the answer any more: it ends if it runs, and waits no longer if it waits."""
        ticket.cancelled.set()
        self._step_out(ticket)
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.cancel()

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; leaving twice does no harm."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        self._step_out(ticket)
        if ticket.running:
            ticket.running = False
            self._running -= 1
            if ticket.began is not None and not ticket.cancelled.is_set():
                self._seconds += _LATEST * (self._clock() - ticket.began - self._seconds)
        self._hand_out()

    def _step_out(self, ticket: Ticket) -> None:
        line = self._lines.get(ticket.client)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._lines[ticket.client]

    def _hand_out(self) -> None:
        while self._running < self.slots and self._lines:
            client, line = next(iter(self._lines.items()))
            ticket = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            assert ticket.turn is not None  # who is in a line waits
            ticket.running, ticket.began = True, self._clock()
            self._running += 1
            ticket.turn.set_result(None)

    def _retry_after(self) -> int:
        """Seconds until a place gets free: some request has to end."""
        seconds = math.ceil(self._seconds / self.slots)
        return min(max(seconds, 1), _LONGEST_WAIT_SECONDS)
