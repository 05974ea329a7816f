"""Lets one generation at a time use the engine, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, get_ident

from edge_spec.errors import RequestError

# Seconds between two looks at whether somebody who waits still wants to.
_PATIENCE = 0.02


@dataclass(eq=False)
class _Ticket:
    thread: int


class Admission:
    """A queue; whoever is first in it has the engine."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._queue: deque[_Ticket] = deque()

    def require_no_turn(self) -> None:
        """Raise RequestError if this thread has a turn, since waiting for its own end would take forever."""
        with self._changed:
            if any(ticket.thread == get_ident() for ticket in self._queue):
                raise RequestError(
                    "This engine is already generating for this thread. Exhaust or close the other stream first, ask "
                    "from another thread, which then waits for its turn, or load another engine."
                )

    @contextmanager
    def turn(self, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            give_up: asked now and then while waiting, whether to wait no longer.

        Yields:
            Whether it is this thread's turn; false if it gave up.

        Raises:
            RequestError: this thread has a turn already.
        """
        ticket = _Ticket(get_ident())
        try:
            with self._changed:
                self.require_no_turn()
                self._queue.append(ticket)
            yield self._wait(ticket, give_up)
        finally:
            with self._changed:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                self._changed.notify_all()

    def _wait(self, ticket: _Ticket, give_up: Callable[[], bool]) -> bool:
        while True:
            with self._changed:
                if self._queue[0] is ticket:
                    return True
                self._changed.wait(_PATIENCE)
            if give_up():
                return False
