"""The shape of a session call, and how far its rows are padded."""

from __future__ import annotations

from dataclasses import dataclass

# No kernel takes rows in smaller blocks than this. In wider calls a last block of one row would round differently, so
# those get an even number of rows (docs/exactness.md).
_ONE_BLOCK_ROWS = 16


@dataclass(frozen=True)
class CallShape:
    """The shape of a call.

    Attributes:
        rows: tokens, padding included.
        logit_rows: rows whose logits are computed, padding included.
        total: length of cache and rows together that attention is told; ``None`` for the true one.
    """

    rows: int
    logit_rows: int
    total: int | None = None


@dataclass(frozen=True)
class Padding:
    """How many rows calls get.

    Attributes:
        exact: whether a row must have the same bits whatever rows travel with it. Kernels of a CPU for one row round
            differently from those for several.
        fixed_rows: exactly so many for every call; ``None`` where that goes by the tokens.
    """

    exact: bool
    fixed_rows: int | None = None

    def rows(self, needed: int) -> int:
        """Rows of a matrix that must have so many; a fixed width is at least that."""
        if self.fixed_rows is not None:
            return self.fixed_rows
        if not self.exact:
            return needed
        return needed + needed % 2 if needed > _ONE_BLOCK_ROWS else max(needed, 2)

    def shape(self, rows: int, logit_rows: int) -> CallShape:
        """The shape of a call with so many tokens, and logits of so many rows."""
        # The kernel of the last matrix depends on its rows as well, so they are padded likewise.
        return CallShape(self.rows(rows), max(self.rows(logit_rows), logit_rows) if logit_rows else 0)
