"""Rows of logits as a call of a model returns them: whole, or on the device with their likeliest tokens here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class LogitRows(Protocol):
    """What a call says: an array float32 [rows, columns], or :class:`SelectedRows`. Valid until the next call."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        ...

    def __len__(self) -> int:
        """How many rows there are."""
        ...

    def __getitem__(self, row: int, /) -> Any:
        """A whole row, float32 [columns]."""
        ...

    def __array__(self) -> NDArray[Any]:
        """All rows, float32 [rows, columns]."""
        ...


@dataclass(frozen=True)
class TopTokens:
    """What is known of a row without looking at all of it.

    Attributes:
        ids: int64 [n], ascending.
        logits: float32 [n], theirs, after processing if there is any.
        ceiling: no other id's logit is above it.
        given: float32 [n], theirs as the model gave them.
        log_sum_exp: of the whole row as the model gave it, finite; up to the rounding of a sum in single precision.
        lift: the most that processing added to any other logit; ``None`` if nothing was processed.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    ceiling: np.float32
    given: NDArray[np.float32]
    log_sum_exp: float
    lift: float | None = None

    @cached_property
    def peak(self) -> np.float32:
        """The largest logit among those that are known."""
        peak: np.float32 = self.logits.max()
        return peak

    @property
    def likeliest(self) -> int | None:
        """The likeliest token of the row, the lowest id among equals; ``None`` if it may be one of the others."""
        return int(self.ids[self.logits.argmax()]) if self.peak > self.ceiling else None

    def allows(self, token: int) -> bool | None:
        """Whether the token is possible; ``None`` if that is not known."""
        place = int(np.searchsorted(self.ids, token))
        known = place < len(self.ids) and self.ids[place] == token
        return bool(self.logits[place] > -np.inf) if known else None


class SelectedRows:
    """Rows of which the likeliest tokens came from the device, and the rest comes when somebody asks for it.

    Attributes:
        fetched: how many whole rows were brought from the device.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        logits: NDArray[np.float32],
        log_sum_exp: NDArray[np.float32],
        columns: int,
        fetch: Callable[[int], NDArray[np.float32]],
    ) -> None:
        """Wrap what a call gave.

        Args:
            ids: int64 [rows, n], the likeliest tokens; which of equals come first, or are left out, does not matter.
            logits: float32 [rows, n], theirs, descending.
            log_sum_exp: float32 [rows], of the whole rows; not a finite number where a logit is NaN or +inf.
            columns: of whole rows.
            fetch: brings a whole row, float32 [columns], by its number.
        """
        self._ids, self._logits, self._log_sum_exp = ids, logits, log_sum_exp
        self._fetch = fetch
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._tops: dict[int, TopTokens] = {}
        self.shape = (len(ids), columns)
        self.fetched = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """A whole row, float32 [columns]."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if row not in self._rows:
            if self._is_complete(row):
                self._rows[row] = np.full(self.shape[1], -np.inf, np.float32)
                self._rows[row][self._ids[row]] = self._logits[row]
            else:
                self._rows[row] = self._fetch(row)
                self.fetched += 1
        return self._rows[row]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All rows, which brings them all from the device."""
        whole = np.empty(self.shape, np.float32)
        for row in range(len(self)):
            whole[row] = self[row]
        return whole if dtype is None else whole.astype(dtype)

    def top(self, row: int) -> TopTokens | None:
        """What is known of a row; ``None`` if it has to be looked at whole, for one because it holds NaN."""
        if row not in self._tops:
            log_sum_exp: float = self._log_sum_exp.item(row)
            if not math.isfinite(log_sum_exp) or self._is_complete(row):
                return None
            order = self._ids[row].argsort()
            logits = self._logits[row, order]
            ceiling: np.float32 = self._logits[row, -1]
            self._tops[row] = TopTokens(self._ids[row, order], logits, ceiling, logits, log_sum_exp)
        return self._tops[row]

    def likeliest(self, row: int) -> int | None:
        """The likeliest token of a row, the lowest id among equals; ``None`` if that takes the whole row."""
        logits = self._logits[row]
        highest: float = logits.item(0)
        if not (highest > logits.item(-1) and math.isfinite(self._log_sum_exp.item(row))):
            return None
        ids = self._ids[row]
        if logits.item(1) < highest:
            return int(ids[0])
        return int(ids[logits == highest].min())

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest tokens of every row and their probabilities, likeliest first.

        Returns:
            int64 and float32 [rows, at most ``count``]; probabilities are 0 in rows with NaN or infinity.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            chances = np.exp(self._logits[:, :count] - self._log_sum_exp[:, None])
        chances[~np.isfinite(self._log_sum_exp)] = 0.0
        return self._ids[:, :count], np.minimum(chances, np.float32(1.0))

    def _is_complete(self, row: int) -> bool:
        """Whether the tokens at hand are all that are possible."""
        all_here = self._logits.shape[1] == self.shape[1] or self._logits.item(row, -1) == -math.inf
        return all_here and math.isfinite(self._log_sum_exp.item(row))


def top_of(rows: Any, row: int) -> TopTokens | None:
    """What is known of a row without looking at all of it; ``None`` for rows that are whole anyway."""
    top = getattr(rows, "top", None)
    known: TopTokens | None = None if top is None else top(row)
    return known


def likeliest_of(rows: Any, row: int) -> int | None:
    """The likeliest token of a row if it is known without looking at all of the row."""
    likeliest = getattr(rows, "likeliest", None)
    token: int | None = None if likeliest is None else likeliest(row)
    return token
