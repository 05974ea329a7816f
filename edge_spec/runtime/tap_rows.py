"""Hidden states that a target's calls have told of the tokens of a text, kept until a head has read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Rows of a text that are kept for a head at most. What is older it does without: reading all of a long prompt would
# take longer than what that says about its end is worth.
MOST_TAP_ROWS = 512

# Rows that a text keeps while another has its turn: about those of a round, so that texts can take turns in each.
KEPT_TAP_ROWS = 32

# Rows by which the memory grows.
_STEP = 64


class TapRows:
    """Rows of some consecutive tokens, the last of them those of the text's end.

    A head reads them once, and then they are gone. Of a long text that nobody reads, the latest are kept: a head that
    comes late begins there.

    Attributes:
        width: elements of a row, those of all taps.
        limit: most rows.
        start, stop: the tokens whose rows there are, as positions in the text.
    """

    def __init__(self, width: int, limit: int) -> None:
        """Start without rows."""
        self.width = width
        self.limit = limit
        self.start = self.stop = 0
        self._rows = np.empty((0, width), np.float32)
        self._first = 0  # where in the memory the row of ``start`` lies

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory there is."""
        return self._rows.nbytes

    def append(self, position: int, parts: Sequence[NDArray[np.floating]]) -> None:
        """Take the rows of a call.

        Args:
            position: of its first token; rows from there on are replaced.
            parts: of each tap, [rows, hidden].
        """
        self.rollback(position)
        if position > self.stop:  # what lies between was never told
            self.clear(position)
        count = len(parts[0])
        skipped = max(0, count - self.limit)
        if skipped:
            self.clear(position + skipped)
        self._make_room(count - skipped)
        at, column = self._first + self.stop - self.start, 0
        for part in parts:
            self._rows[at : at + count - skipped, column : column + part.shape[1]] = part[skipped:]
            column += part.shape[1]
        self.stop += count - skipped

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows of the tokens ``start`` to ``stop``, which must be there: float32 [rows, width], not to be changed."""
        at = self._first - self.start
        return self._rows[at + start : at + stop]

    def release(self, length: int) -> None:
        """Forget rows of the first ``length`` tokens."""
        start = min(max(length, self.start), self.stop)
        self._first += start - self.start
        self.start = start

    def rollback(self, length: int) -> None:
        """Forget rows of tokens from ``length`` on."""
        self.stop = min(self.stop, length)
        if self.stop < self.start:
            self.clear(self.stop)

    def keep(self, length: int, slots: Sequence[int]) -> None:
        """Keep rows of the first ``length`` tokens and, right behind them, those in ``slots``, in ascending order."""
        stop = length + len(slots)
        if slots and slots[-1] != stop - 1:
            if not self.start <= length <= slots[-1] < self.stop:  # not all of them are there
                self.clear(stop)
                return
            at = self._first - self.start
            self._rows[at + length : at + stop] = self._rows[[at + slot for slot in slots]]
        self.rollback(stop)

    def copy(self, other: TapRows, length: int) -> None:
        """Hold what another has of the first ``length`` tokens."""
        self.clear(min(other.start, length))
        stop = min(other.stop, length)
        if stop > self.start:
            self.append(self.start, [other.read(self.start, stop)])

    def clear(self, position: int = 0) -> None:
        """Hold no rows; the next ones are expected at ``position``."""
        self.start = self.stop = position
        self._first = 0

    def trim(self) -> None:
        """Keep the last few rows, and give the other memory back."""
        self.release(self.stop - KEPT_TAP_ROWS)
        if len(self._rows) > KEPT_TAP_ROWS:
            self._rows, self._first = self.read(self.start, self.stop).copy(), 0

    def give_back(self) -> None:
        """Forget everything, and give the memory back."""
        self.clear()
        self._rows = np.empty((0, self.width), np.float32)

    def _make_room(self, count: int) -> None:
        """Make room for so many more rows behind the last, at the cost of the first ones beyond the limit."""
        self.release(self.stop + count - self.limit)
        held = self.stop - self.start
        if self._first + held + count <= len(self._rows):
            return
        rows = self._rows
        if held + count > len(rows):
            # Twice what is needed, so that rows need not be moved in every call.
            capacity = min(2 * self.limit, -(-2 * (held + count) // _STEP) * _STEP)
            rows = np.empty((capacity, self.width), np.float32)
        rows[:held] = self._rows[self._first : self._first + held]
        self._rows, self._first = rows, 0
