"""Grids of 4-bit blocks, chosen by what rounding to them does to a matrix's output (docs/quantization.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_SMALLEST = np.finfo(np.float32).tiny

# How many steps the range of a block is first divided into. Fifteen cover it; more leave out its ends, so that all
# other values get finer steps.
_STEPS = (15.0, 16.2, 18.0, 21.0)
# The same from zero to the value of largest magnitude, where the grid is symmetric: eight cover it.
_SYMMETRIC_STEPS = (8.0, 7.5, 8.7, 9.6)
_SYMMETRIC_ZERO = np.float32(8)
# Zero points tried around the best one, and at last its own, each time with the scale that was fitted last.
_SHIFTS = (0, 1, -1, 0)
_SYMMETRIC_SHIFTS = (0, 0)
# Elements rounded at a time, so that they and two temporaries stay in a core's cache; of as many outputs, since whole
# vectors are faster.
_ELEMENTS_AT_ONCE = 1 << 17
_OUTPUTS_AT_ONCE = 256


def fit_blocks(
    weight: Float32Array, importance: Float32Array, block_size: int, zero_points: bool
) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Round a matrix to 4 bits in blocks along the input, each block on the grid that serves it best.

    A few grids are tried for each block: the one over its range, which round-to-nearest takes, and others whose step is
    fitted to the rounded values by least squares. What counts is the squared error of a weight times the mean square of
    its input, as with an importance matrix of llama.cpp.

    Args:
        weight: float32 [out, in]; the last block is padded with zeros.
        importance: float32 [in], mean square of each input.
        block_size: inputs that share a scale.
        zero_points: whether each block has one of its own; otherwise it is 8.

    Returns:
        uint8 [out, blocks, block_size] up to 15, float32 scales [out, blocks], uint8 zero points [out, blocks].
    """
    missing = -weight.shape[1] % block_size
    if missing:
        weight, importance = np.pad(weight, ((0, 0), (0, missing))), np.pad(importance, (0, missing))
    outputs, inputs = weight.shape
    blocks = inputs // block_size
    counted = (importance / max(importance.max(), _SMALLEST)).reshape(blocks, block_size, 1)
    integers = np.empty((outputs, blocks, block_size), np.uint8)
    scales = np.empty((outputs, blocks), np.float32)
    zeros = np.empty((outputs, blocks), np.uint8)

    def fit(piece: tuple[slice, slice]) -> None:
        rows, columns = piece
        # Outputs last: sums over a block then run over whole vectors.
        first, last = columns.start * block_size, columns.stop * block_size
        grouped = np.ascontiguousarray(weight[rows, first:last].T).reshape(-1, block_size, rows.stop - rows.start)
        with np.errstate(over="ignore", invalid="ignore"):  # what is infinite is no candidate
            rounded, scale, zero = _fit(grouped, counted[columns], zero_points)
        integers[piece], scales[piece], zeros[piece] = rounded.transpose(2, 0, 1), scale.T, zero.T

    at_once = max(1, _ELEMENTS_AT_ONCE // (block_size * min(outputs, _OUTPUTS_AT_ONCE)))
    pieces = product(_slices(outputs, _OUTPUTS_AT_ONCE), _slices(blocks, at_once))
    # On every processor: numpy lets go of the interpreter in between.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(fit, pieces):
            pass
    return integers, scales, zeros


def _fit(
    grouped: Float32Array, importance: Float32Array, zero_points: bool
) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Round blocks [blocks, size, outputs]; the scales and zero points are [blocks, outputs]."""
    search = _Search(grouped, importance)
    for scale, zero in _grids(grouped, zero_points):
        search.consider(scale, zero)
    for shift in _SHIFTS if zero_points else _SYMMETRIC_SHIFTS:
        search.consider(search.scale, np.clip(search.zero + np.float32(shift), 0, 15))
    integers = search.snap(search.scale, search.zero)
    integers += search.zero[:, None]
    return integers.astype(np.uint8), search.scale, search.zero.astype(np.uint8)


class _Search:
    """Keeps the best grid of each block: ``scale`` and ``zero``, float32 [blocks, outputs].

    With whole steps q from zero and importance m, the best scale for weights w is sum(m w q) / sum(m q^2), and the
    error that is left is sum(m w^2) less the product of this scale and sum(m w q). So the larger that is, the better,
    and the error itself need not be computed.
    """

    def __init__(self, grouped: Float32Array, importance: Float32Array) -> None:
        """Search for blocks [blocks, size, outputs] with the importance of each input, [blocks, size, 1]."""
        self._grouped, self._weighted = grouped, grouped * importance
        self._importance = importance[:, :, 0]
        self._steps = np.empty_like(grouped)
        self._gained: Float32Array | None = None
        self.scale = self.zero = np.zeros(0, np.float32)

    def consider(self, scale: Float32Array, zero: Float32Array) -> None:
        """Round to a grid, fit its scale to that, and keep it where it is better than what is known."""
        steps = self.snap(scale, zero)
        along = np.einsum("bso,bso->bo", self._weighted, steps)
        power = np.einsum("bs,bso->bo", self._importance, np.square(steps, out=steps))
        fitted = _without_subnormals(np.divide(along, power, out=np.zeros_like(scale), where=power > _SMALLEST))
        gained = fitted * along
        known = np.isfinite(gained) & (fitted != 0)
        if self._gained is None:
            self.scale, self.zero = np.where(known, fitted, scale), zero
            self._gained = np.where(known, gained, np.float32(0))
            return
        better = known & (gained > self._gained)
        np.copyto(self.scale, fitted, where=better)
        np.copyto(self.zero, zero, where=better)
        np.copyto(self._gained, gained, where=better)

    def snap(self, scale: Float32Array, zero: Float32Array) -> Float32Array:
        """Round to a grid: whole steps from zero, in the shape of the blocks, in memory used again by the next call."""
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        steps = np.multiply(self._grouped, inverse[:, None], out=self._steps)
        np.rint(steps, out=steps)
        np.maximum(steps, -zero[:, None], out=steps)  # faster than np.clip with two arrays
        return np.minimum(steps, (15 - zero)[:, None], out=steps)


def _grids(grouped: Float32Array, zero_points: bool) -> Iterator[tuple[Float32Array, Float32Array]]:
    """The scales and zero points to begin with, that of round-to-nearest first."""
    highest, lowest = grouped.max(axis=1), grouped.min(axis=1)
    if not zero_points:
        extreme = np.where(highest > -lowest, highest, lowest)
        for steps in _SYMMETRIC_STEPS:
            scale = _without_subnormals(extreme / np.float32(-steps))
            yield scale, np.full_like(scale, _SYMMETRIC_ZERO)
        return
    highest, lowest = np.maximum(highest, 0), np.minimum(lowest, 0)
    for steps in _STEPS:
        scale = _without_subnormals(highest / np.float32(steps) - lowest / np.float32(steps))
        zero = np.rint(np.divide(-lowest, scale, out=np.zeros_like(scale), where=scale != 0))
        yield scale, np.clip(zero, 0, 15)


def _without_subnormals(scale: Float32Array) -> Float32Array:
    """Make scales zero whose inverse could be infinite; such a block is as good as zero."""
    scale[np.abs(scale) < _SMALLEST] = 0
    return scale


def _slices(count: int, at_once: int) -> list[slice]:
    return [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
