"""Rotary position embedding tables, shared by the graph and the float32 reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Rope


def rotary_tables(
    rope: Rope, head_size: int, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cos and sin, each float32 [positions, head_size / 2] (Su et al. 2021, rotate-half layout)."""
    frequencies = rope.theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if rope.frequency_factors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
