"""Rotary position embedding: its parameters, and the tables that the graph and the float32 reference share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, rotate-half layout.

    Every static scaling scheme (linear, Llama 3, YaRN, LongRoPE) reduces to divisors of the frequencies and a factor.

    Attributes:
        theta: base of the geometric frequency series.
        size: elements of a head that are rotated, the first ones.
        frequency_factors: ``size / 2`` divisors of the inverse frequencies, or ``None`` for all ones.
        magnitude: what cos and sin are multiplied by.
    """

    theta: float
    size: int
    frequency_factors: tuple[float, ...] | None = None
    magnitude: float = 1.0


def rotary_tables(rope: Rope, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cos and sin, each float32 [positions, size / 2] (Su et al. 2021, rotate-half layout)."""
    frequencies = rope.theta ** -(np.arange(0, rope.size, 2, dtype=np.float64) / rope.size)
    if rope.frequency_factors is not None:
        with np.errstate(over="ignore"):
            frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    with np.errstate(all="ignore"):  # whoever packs the tables checks that they are finite
        angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
        cos, sin = rope.magnitude * np.cos(angles), rope.magnitude * np.sin(angles)
        return cos.astype(np.float32), sin.astype(np.float32)
