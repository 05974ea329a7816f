"""Grids of 4-bit blocks, chosen by what rounding to them does to a matrix's output (docs/quantization.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
_SYMMETRIC_ZERO = 8
# Elements rounded at a time, so that they and their temporaries stay in a core's cache.
_ELEMENTS_AT_ONCE = 1 << 16


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

    def fit(rows: slice) -> None:
        # Outputs last: sums over a block then run over whole vectors.
        grouped = np.ascontiguousarray(weight[rows].T).reshape(blocks, block_size, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite error is no smaller than another
            rounded, scale, zero = _fit(grouped, counted, zero_points)
        integers[rows], scales[rows], zeros[rows] = rounded.transpose(2, 0, 1), scale.T, zero.T

    _in_threads(fit, outputs, max(1, _ELEMENTS_AT_ONCE // inputs))
    return integers, scales, zeros


def _fit(
    grouped: Float32Array, importance: Float32Array, zero_points: bool
) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Round blocks [blocks, size, outputs]; the scales and zero points are [blocks, outputs]."""
    best: tuple[Float32Array, Float32Array, Float32Array] | None = None
    least = np.zeros(0, np.float32)
    for scale, zero in _grids(grouped, zero_points):
        if best is None:
            integers = _snap(grouped, scale, zero)
            best, least = (integers, scale, zero), _error(grouped, integers, scale, importance)
        # Counted from the zero point.
        centred = _snap(grouped, scale, zero)
        weighted = centred * importance
        along = (weighted * centred).sum(axis=1)
        fitted = np.divide((weighted * grouped).sum(axis=1), along, out=scale.copy(), where=along > _SMALLEST)
        fitted = _without_subnormals(fitted)
        centred = _snap(grouped, fitted, zero)
        error = _error(grouped, centred, fitted, importance)
        better = error < least
        least = np.where(better, error, least)
        best = (
            np.where(better[:, None], centred, best[0]),
            np.where(better, fitted, best[1]),
            np.where(better, zero, best[2]),
        )
    assert best is not None  # there are grids
    centred, scale, zero = best
    centred += zero[:, None]
    return centred.astype(np.uint8), scale, zero.astype(np.uint8)


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


def _snap(grouped: Float32Array, scale: Float32Array, zero: Float32Array) -> Float32Array:
    """Round to a grid: whole steps from zero, float32 of the shape of ``grouped``."""
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    steps = grouped * inverse[:, None]
    np.rint(steps, out=steps)
    np.maximum(steps, -zero[:, None], out=steps)
    return np.minimum(steps, (15 - zero)[:, None], out=steps)


def _error(grouped: Float32Array, steps: Float32Array, scale: Float32Array, importance: Float32Array) -> Float32Array:
    off = steps * scale[:, None]
    off -= grouped
    np.square(off, out=off)
    off *= importance
    error: Float32Array = off.sum(axis=1)
    return error


def _without_subnormals(scale: Float32Array) -> Float32Array:
    """Make scales zero whose inverse could be infinite; such a block is as good as zero."""
    scale[np.abs(scale) < _SMALLEST] = 0
    return scale


def _in_threads(work: Callable[[slice], None], rows: int, at_once: int) -> None:
    """Call ``work`` for slices of rows, on every processor: numpy lets go of the interpreter in between."""
    slices = [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(work, slices):
            pass
