"""What a call of one model costs, by its rows and by the tokens in the cache, as measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bounds for what a file may say.
_MOST_POINTS = 64
_MOST_ROWS = 4096
_MOST_SECONDS = 1e4


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a call: linear in the tokens it finds in the cache, and in its rows between the measured row counts.

    Attributes:
        rows: measured row counts, ascending from 1.
        seconds: of a call with so many rows on an empty cache; never less for more rows.
        growth: seconds more for each token in the cache; never less for more rows.

    Raises:
        ValueError: the numbers describe no such curve.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    growth: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.rows) == len(self.seconds) == len(self.growth) <= _MOST_POINTS:
            raise ValueError(f"{len(self.rows)} row counts, {len(self.seconds)} costs and {len(self.growth)} growths")
        if any(type(count) is not int for count in self.rows) or self.rows[0] != 1 or self.rows[-1] > _MOST_ROWS:
            raise ValueError(f"row counts are {self.rows}, expected integers from 1 to {_MOST_ROWS}")
        if any(left >= right for left, right in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"row counts are {self.rows}, expected ascending ones")
        for numbers, least in ((self.seconds, 1e-9), (self.growth, 0.0)):
            if any(type(number) not in (int, float) or not math.isfinite(number) for number in numbers):
                raise ValueError(f"costs are {numbers}, expected finite numbers")
            if not least <= numbers[0] <= numbers[-1] <= _MOST_SECONDS or list(numbers) != sorted(numbers):
                raise ValueError(f"costs are {numbers}, expected {least} to {_MOST_SECONDS} s, none below its left")

    @classmethod
    def fit(
        cls, past: int, seconds: Mapping[int, float], far_past: int = 0, far_seconds: Mapping[int, float] | None = None
    ) -> CostCurve:
        """Draw the curve through measurements, of which any may be too long, but none much too short.

        Args:
            past: tokens in the cache at ``seconds``.
            seconds: by row count, 1 among them.
            far_past: tokens in the cache at ``far_seconds``, more than ``past``.
            far_seconds: by row count, a few of those above; none where the context has no room for more past.
        """
        rows = tuple(sorted(seconds))
        near = [seconds[count] for count in rows]
        known = sorted(far_seconds or {})
        growth = [0.0] * len(rows)
        if far_seconds and known:
            slopes = [max((far_seconds[count] - seconds[count]) / (far_past - past), 0.0) for count in known]
            # Rows read the past at most once each, so one row's share of the widest call's is the least it can be.
            slopes = [max(slope, slopes[-1] * count / known[-1]) for count, slope in zip(known, slopes, strict=True)]
            growth = [max(interpolate(known, _lowered(slopes), count), 0.0) for count in rows]
        # A slope is noise as far as it says that the little past at hand took more than half of the call.
        growth = [min(slope, cost / (2 * max(past, 1))) for slope, cost in zip(growth, near, strict=True)]
        empty = [cost - slope * past for slope, cost in zip(growth, near, strict=True)]
        return cls(rows, tuple(_lowered(empty)), tuple(_lowered(growth)))

    @property
    def widest(self) -> int:
        """The largest measured row count."""
        return self.rows[-1]

    def at(self, rows: int, past: int) -> float:
        """Seconds of a call with ``rows`` rows and ``past`` tokens in the cache."""
        return interpolate(self.rows, self.seconds, rows) + interpolate(self.rows, self.growth, rows) * past

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {"rows": list(self.rows), "seconds": list(self.seconds), "growth": list(self.growth)}

    @classmethod
    def from_dict(cls, body: Any) -> CostCurve:
        """Read what :meth:`to_dict` returned. Raises ValueError if it is anything else."""
        lists = [body.get(key) for key in ("rows", "seconds", "growth")] if isinstance(body, dict) else [None]
        if not all(isinstance(numbers, list) and len(numbers) <= _MOST_POINTS for numbers in lists):
            raise ValueError(f"{str(body)[:80]} is no cost curve")
        return cls(*map(tuple, lists))  # type: ignore[arg-type]  # checked by the class


def interpolate(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear between the points and beyond the last; the first value before the first, the only value everywhere."""
    if at <= points[0] or len(points) == 1:
        return values[0]
    right = min(bisect_left(points, at), len(points) - 1)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    return values[left] + share * (values[right] - values[left])


def _lowered(costs: Sequence[float]) -> list[float]:
    """Lower each cost to the least of those after it: a wider call shows that a narrow one was merely disturbed."""
    lowered = list(costs)
    for index in range(len(costs) - 2, -1, -1):
        lowered[index] = min(lowered[index], lowered[index + 1])
    return lowered
