"""Which ids the columns of a head's logits stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.errors import CheckpointError
from edge_spec.export.heads.head_tensors import HeadTensors


@dataclass(frozen=True)
class DraftColumns:
    """The columns in the order of their ids.

    Attributes:
        order: int64 [columns], which row of the stored lm_head each column is.
        ids: int64 [columns], ascending; ``None`` where column i is id i, and columns behind the ids are padding.
    """

    order: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64] | None


def columns_of(tensors: HeadTensors, columns: int, vocab_size: int) -> DraftColumns:
    """Read ``d2t``, the distance of each column's id from the column, if it is there.

    Args:
        tensors: of the head.
        columns: rows of its lm_head.
        vocab_size: usable ids of the target.

    Raises:
        CheckpointError: an id is beyond the target's, or two columns have the same.
    """
    count = np.arange(columns, dtype=np.int64)
    if "d2t" not in tensors:
        return DraftColumns(count, count if columns < vocab_size else None)
    ids = count + tensors.integers("d2t", columns)
    if (ids < 0).any() or (ids >= vocab_size).any():
        column = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise CheckpointError(
            f"{tensors.source}: 'd2t' gives column {column} the id {ids[column]}, but the target's ids are 0 to "
            f"{vocab_size - 1}; is it a head for this target?"
        )
    order = np.argsort(ids, kind="stable")
    ascending = ids[order]
    if (same := ascending[1:] == ascending[:-1]).any():
        raise CheckpointError(
            f"{tensors.source}: 'd2t' gives two columns the id {ascending[1:][same][0]}; the head is damaged"
        )
    return DraftColumns(order, ascending)
