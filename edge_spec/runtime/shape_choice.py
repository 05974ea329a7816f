"""Which shape a call gets: one of a few, where calls are snapped, or with so many rows that each keeps its bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.shape_grid import ShapeGrid

# No kernel takes rows in smaller blocks than this. In wider calls a last block of one row would round differently, so
# those get an even number of rows (docs/exactness.md).
_ONE_BLOCK_ROWS = 16


@dataclass(frozen=True)
class ShapeChoice:
    """How shapes are chosen.

    Attributes:
        exact_rows: whether a row must have the same bits whatever rows travel with it. Kernels of a CPU for one row
            round differently from those for several.
        fixed_rows: exactly so many for every call; ``None`` where that goes by the tokens.
        grid: the shapes that calls are snapped to; ``None`` for none.
        least_logit_rows: fewest rows of logits that a call asks for.
    """

    exact_rows: bool
    fixed_rows: int | None
    grid: ShapeGrid | None
    least_logit_rows: int

    def of(self, rows: int, logit_rows: int, past: int, snaps: bool) -> CallShape:
        """The shape of a call.

        Args:
            rows: tokens of the call, at most ``fixed_rows``.
            logit_rows: rows whose logits are wanted.
            past: tokens in the cache.
            snaps: whether it may be one of the grid.
        """
        snapped = None if self.grid is None or not snaps else self.grid.snap(rows, logit_rows, past)
        if snapped is not None:
            return replace(snapped, logit_rows=max(snapped.logit_rows, self.least_logit_rows))
        asked = max(logit_rows, self.least_logit_rows)
        # The kernel of the last matrix depends on its rows as well, so they are padded likewise.
        return CallShape(self._padded(rows), max(self._padded(asked), asked) if asked else 0)

    def _padded(self, rows: int) -> int:
        if self.fixed_rows is not None:
            return self.fixed_rows
        if not self.exact_rows:
            return rows
        return rows + rows % 2 if rows > _ONE_BLOCK_ROWS else max(rows, 2)
