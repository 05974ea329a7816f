"""Who may use the engine next: texts take turns, a target call each, and begin in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, RLock, local
from time import monotonic

from edge_spec.errors import RequestError

# Seconds between two looks at whether somebody who waits still wants to.
_PATIENCE = 0.05
# Seconds after which a text that nobody asks to go on makes room for one that waits for it.
_STALLED = 0.2


class Ticket:
    """A text that wants turns.

    Attributes:
        slots: cache slots it may need until it ends.
        admitted: whether it has room, and so takes part in the turns.
    """

    def __init__(self, slots: int, lock: RLock) -> None:
        """Ask for so much room; ``lock`` is that of all tickets."""
        self.slots = slots
        self.admitted = False
        self._may_go = Condition(lock)
        self._last_turn = monotonic()


class Turns:
    """Shares one engine between texts that are written at the same time.

    A text is admitted when all that are being written have room beside it, in the order in which they came. From then
    on it takes turns with the others, first come, first served. Who does not ask for a turn for a while (a stream that
    nobody reads) keeps its room only as long as nobody waits for it; it then queues again.
    """

    def __init__(self, slots: int) -> None:
        """Share ``slots`` cache slots. One text alone is admitted whatever it needs."""
        self._slots = slots
        self._lock = RLock()  # reentrant: an abandoned stream may be closed by the collector at any time
        self._tickets: list[Ticket] = []  # of all texts being written
        self._arrivals: deque[Ticket] = deque()  # that ask for a turn and have no room yet
        self._line: deque[Ticket] = deque()  # that have room and ask for a turn; the first has it
        self._busy = False  # whether the first is in the middle of its turn
        self._thread = local()  # has ``inside`` while a thread waits for a turn or is in the middle of one

    @property
    def running(self) -> int:
        """How many texts are being written and have room."""
        with self._lock:
            return sum(ticket.admitted for ticket in self._tickets)

    @property
    def waiting(self) -> int:
        """How many texts ask for a turn that they do not have."""
        with self._lock:
            return len(self._arrivals) + len(self._line) - self._busy

    def enter(self, slots: int) -> Ticket:
        """Begin a text that may need so many slots; it then takes turns, until :meth:`leave`."""
        ticket = Ticket(slots, self._lock)
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """End a text."""
        with self._lock:
            self._tickets.remove(ticket)
            self._hand_on()

    @contextmanager
    def turn(self, ticket: Ticket, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            ticket: whose turn.
            give_up: asked now and then while waiting, whether to wait no longer.

        Yields:
            Whether it is its turn; false if it gave up.

        Raises:
            RequestError: this thread is in a turn already, whose end it would wait for without end.
        """
        if getattr(self._thread, "inside", False):
            raise RequestError(
                "The engine was asked for a text by a function that it called itself (cancelled, a logits processor or "
                "a drafter), whose own text would wait for that one; ask when the function has returned."
            )
        try:
            self._thread.inside = True
            with self._taken(ticket, give_up) as admitted:
                yield admitted
        finally:
            self._thread.inside = False

    @contextmanager
    def _taken(self, ticket: Ticket, give_up: Callable[[], bool]) -> Iterator[bool]:
        with self._lock:
            (self._line if ticket.admitted else self._arrivals).append(ticket)
        try:
            yield self._wait(ticket, give_up)
        finally:
            with self._lock:
                if ticket in self._arrivals:
                    self._arrivals.remove(ticket)
                elif ticket is self._line[0] and self._busy:
                    self._busy = False
                    self._line.popleft()
                else:
                    self._line.remove(ticket)
                ticket._last_turn = monotonic()
                self._hand_on()

    def _wait(self, ticket: Ticket, give_up: Callable[[], bool]) -> bool:
        while True:
            with self._lock:
                self._admit()
                if self._line and self._line[0] is ticket and not self._busy:
                    self._busy = True
                    return True
                ticket._may_go.wait(_PATIENCE)
            if give_up():
                return False

    def _hand_on(self) -> None:
        """Wake whoever is next."""
        self._admit()
        if self._line and not self._busy:
            self._line[0]._may_go.notify()

    def _admit(self) -> None:
        """Give room to those that came first, as far as there is any."""
        while self._arrivals:
            first = self._arrivals[0]
            others = [ticket for ticket in self._tickets if ticket.admitted]
            if others and sum(ticket.slots for ticket in others) + first.slots > self._slots:
                stalled = [ticket for ticket in others if self._has_stalled(ticket)]
                if not stalled:
                    return
                min(stalled, key=lambda ticket: ticket._last_turn).admitted = False
                continue
            first.admitted = True
            self._line.append(self._arrivals.popleft())

    def _has_stalled(self, ticket: Ticket) -> bool:
        return ticket not in self._line and monotonic() - ticket._last_turn > _STALLED
