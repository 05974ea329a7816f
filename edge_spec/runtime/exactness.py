"""Whether speculation can be bitwise exact on this machine: measured, not assumed.

Speculative output equals plain output bit for bit if a row's logits do not depend on the rows it travels with. That is
a property of kernels, which differ between processors, providers and versions, so the engine runs the same tokens
through the target in calls of several widths and compares.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from edge_spec.runtime.model import Model

Exactness = Literal["bitwise", "distribution"]

# Widths that a round can have: a plain step (padded), short and long proposals.
_WIDTHS = (1, 2, 3, 5, 8)
_ROWS = 9
_CACHED = 11


def measure_exactness(target: Model, vocab_size: int) -> Exactness:
    """Compare rows computed in calls of several widths.

    Args:
        target: a model whose cache is empty, and is empty again afterwards.
        vocab_size: ids that may be fed.

    Returns:
        ``"bitwise"`` if every row came out the same bit for bit, else ``"distribution"``.
    """
    tokens = np.random.default_rng(0).integers(0, vocab_size, _CACHED + _ROWS).tolist()
    if len(tokens) > target.context:
        tokens = tokens[: target.context]
    cached, rows = tokens[:-_ROWS], tokens[-_ROWS:]
    target.cache.rollback(0)
    try:
        target.prefill(cached)
        expected = target.forward(rows, range(len(rows))).copy()
        for width in _WIDTHS:
            target.cache.rollback(len(cached))
            for start in range(0, len(rows), width):
                call = rows[start : start + width]
                logits = target.forward(call, range(len(call)))
                if not np.array_equal(logits, expected[start : start + len(call)]):
                    return "distribution"
    finally:
        target.cache.rollback(0)
    return "bitwise"
