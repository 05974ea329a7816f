"""Which shape a call gets: one of a few, where calls are snapped, or with so many rows that each keeps its bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.shape_grid import ShapeGrid

# Kernels take rows in blocks, and a last block of one row rounds differently, so calls of more rows than the smallest
# block has get an even number of them (docs/exactness.md). Where weights share a scale by more than so many, the blocks
# of some processors have two rows.
_ONE_BLOCK_ROWS, _PAIR = 16, 2
_SHARED_SCALE = 32


@dataclass(frozen=True)
class ShapeChoice:
    """How shapes are chosen.

    Attributes:
        exact_rows: whether a row must have the same bits whatever rows travel with it. Kernels of a CPU for one row
            round differently from those for several.
        fixed_rows: exactly so many for every call; ``None`` where that goes by the tokens.
        even_above: calls of more rows than this get an even number, where rows are exact.
        grid: the shapes that calls are snapped to; ``None`` for none.
        least_logit_rows: fewest rows of logits that a call asks for.
    """

    exact_rows: bool
    fixed_rows: int | None
    even_above: int
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
        return rows + rows % 2 if rows > self.even_above else max(rows, 2)


def rows_of_one_block(formats: Mapping[str, str | int]) -> int:
    """Rows that kernels certainly take together.

    Args:
        formats: of a model's weights, as its record has them, with the ``block_size`` of int4 ones.
    """
    return _PAIR if int(formats.get("block_size", 0)) > _SHARED_SCALE else _ONE_BLOCK_ROWS
