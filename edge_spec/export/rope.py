"""Rotary position embedding: its parameters, and the tables that the graph and the float32 reference share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head, rotate-half layout.

    Attributes:
        theta: base of the geometric frequency series.
        frequency_factors: ``head_size / 2`` divisors of the inverse frequencies, or ``None`` for all ones.
            Every static scaling scheme (linear, Llama 3) reduces to such divisors.
    """

    theta: float
    frequency_factors: tuple[float, ...] | None = None


def rotary_tables(
    rope: Rope, head_size: int, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cos and sin, each float32 [positions, head_size / 2] (Su et al. 2021, rotate-half layout)."""
    frequencies = rope.theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if rope.frequency_factors is not None:
        with np.errstate(over="ignore"):
            frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    with np.errstate(all="ignore"):  # whoever packs the tables checks that they are finite
        angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
