"""Inputs mixed with their neighbours before they are rounded to 8 bits, where no rotation can be folded into weights.

What gate and up give is a product, so its outliers, which differ from token to token, reach the down projection as they
are. There the graph itself multiplies each run of inputs by a small Hadamard matrix H, and the weights are stored
mixed likewise: (x H)(W H)^T = x W^T, and no element of x H is far larger than the others (QuaRot, Ashkboos et al. 2024,
which does this over the whole width).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edge_spec.export.rotation import hadamard

Float32Array = npt.NDArray[np.float32]

# Longer runs would lose no less, and cost more time.
_LONGEST_RUN = 32


def run_length(inputs: int) -> int:
    """How many neighbours are mixed in a row of so many inputs: a power of two that divides them, 1 for none."""
    return min(inputs & -inputs, _LONGEST_RUN)


@lru_cache
def mixer(run: int) -> Float32Array:
    """The matrix H, float32 [run, run]."""
    return hadamard(run.bit_length() - 1)


def mix(x: Float32Array, run: int) -> Float32Array:
    """Mix each run of neighbours in rows, float32 [rows, inputs]."""
    if run == 1:
        return x
    mixed: Float32Array = (x.reshape(-1, run) @ mixer(run)).reshape(x.shape)
    return mixed
