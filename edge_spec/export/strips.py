"""Matrices worked on some rows at a time, so that what is in between stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

# Elements, 1 MB in float32.
_SIZE = 1 << 18


def strips(rows: int, columns: int) -> Iterator[slice]:
    """Cut the rows of a matrix into slices, which together are all of them."""
    step = max(1, _SIZE // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
