"""Some rows of a checkpoint's lm_head, for drafts that propose a part of the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.export.checkpoint import Checkpoint, Float32Array

# Rows that are decoded at a time.
_ROWS_AT_ONCE = 8192


def lm_head_rows(checkpoint: Checkpoint, ids: npt.NDArray[np.int64]) -> Float32Array:
    """Rows of the target's lm_head, float32 [ids, hidden], for ``ids``, int64, ascending.

    Raises:
        ValueError: the lm_head lacks an id.
    """
    facts = checkpoint.architecture
    if len(ids) and not 0 <= ids[0] <= ids[-1] < facts.logits_size:
        raise ValueError(f"ids are {ids[0]} to {ids[-1]}, expected 0 to {facts.logits_size - 1}")
    name = "embed_tokens.weight" if facts.tied_embeddings else "lm_head.weight"
    found = np.empty((len(ids), facts.hidden_size), np.float32)
    for start in range(0, facts.logits_size, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, facts.logits_size)
        first, last = np.searchsorted(ids, (start, stop))
        if first < last:
            found[first:last] = checkpoint.rows(name, start, stop)[ids[first:last] - start]
    return found
