"""Quantization as pure functions of arrays: what a float32 matrix becomes in each storage format."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_spec.export.mixing import mix
from edge_spec.export.rounding import fit_blocks
from edge_spec.export.strips import strips

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_SMALLEST = np.finfo(np.float32).tiny


def quantize_channels(
    weight: Float32Array, signed: bool, run: int = 1
) -> tuple[npt.NDArray[np.int8] | npt.NDArray[np.uint8], Float32Array]:
    """Quantize a matrix symmetrically to 8 bits, one scale per output channel.

    Args:
        weight: float32 [out, in].
        signed: int8 around 0, or uint8 around 128. Both hold the same values.
        run: neighbouring inputs that are mixed first (export/mixing.py).

    Returns:
        Integers [in, out] and float32 scales [out].
    """
    outputs, inputs = weight.shape
    integers: npt.NDArray[Any] = np.empty((inputs, outputs), np.int8 if signed else np.uint8)
    scale: Float32Array = np.empty(outputs, np.float32)
    for strip in strips(outputs, inputs):
        rows = mix(weight[strip], run)
        scale[strip] = np.maximum(np.abs(rows).max(axis=1), _SMALLEST) / np.float32(127)
        rounded = np.rint(rows / scale[strip, None])
        if not signed:
            rounded += 128
        integers[:, strip] = rounded.astype(integers.dtype).T
    return integers, scale


def quantize_blocks(weight: Float32Array, bits: Literal[4, 8], block_size: int) -> tuple[UInt8Array, Float32Array]:
    """Quantize a matrix symmetrically in blocks along the input, around the middle of the unsigned range.

    The value of largest magnitude in a block lands on the bottom of the range, which has one step more than
    the top.

    Args:
        weight: float32 [out, in].
        bits: 4 or 8.
        block_size: inputs that share a scale; the last block is padded with zeros.

    Returns:
        uint8 [out, blocks, block_size * bits / 8], packed as by :func:`pack_nibbles`, and float32 scales [out, blocks].
    """
    grouped = _blocks(weight, block_size)
    middle = 1 << (bits - 1)
    highest, lowest = grouped.max(axis=2), grouped.min(axis=2)
    extreme = np.where(highest > -lowest, highest, lowest)
    scale = _without_subnormals(extreme / np.float32(-middle))
    integers = _round_to_grid(grouped, scale, np.float32(middle), 2 * middle - 1)
    return (pack_nibbles(integers) if bits == 4 else integers), scale


def quantize_blocks_with_zero_points(
    weight: Float32Array, block_size: int
) -> tuple[UInt8Array, Float32Array, UInt8Array]:
    """Quantize a matrix to 4 bits in blocks along the input, each block with a scale and a zero point.

    The grid of a block spans its values and zero, which itself is on the grid.

    Args:
        weight: float32 [out, in].
        block_size: inputs that share a scale; the last block is padded with zeros.

    Returns:
        uint8 [out, blocks, block_size / 2], float32 scales [out, blocks], uint8 zero points [out, ceil(blocks / 2)];
        nibbles packed as by :func:`pack_nibbles`.
    """
    grouped = _blocks(weight, block_size)
    highest, lowest = np.maximum(grouped.max(axis=2), 0), np.minimum(grouped.min(axis=2), 0)
    scale = _without_subnormals(highest / np.float32(15) - lowest / np.float32(15))
    zero_point = np.rint(np.divide(-lowest, scale, out=np.zeros_like(scale), where=scale != 0))
    integers = _round_to_grid(grouped, scale, zero_point[:, :, None], 15)
    return pack_nibbles(integers), scale, _packed_zero_points(zero_point.astype(np.uint8))


def quantize_blocks_by_importance(
    weight: Float32Array, importance: Float32Array, block_size: int, zero_points: bool
) -> tuple[UInt8Array, Float32Array] | tuple[UInt8Array, Float32Array, UInt8Array]:
    """Quantize a matrix to 4 bits as the functions above, on the grids of :func:`rounding.fit_blocks`.

    Args:
        weight: float32 [out, in].
        importance: float32 [in], mean square of each input.
        block_size: inputs that share a scale; the last block is padded with zeros.
        zero_points: whether blocks have them.

    Returns:
        What :func:`quantize_blocks_with_zero_points` returns, or without zero points what :func:`quantize_blocks` does.
    """
    integers, scale, zero_point = fit_blocks(weight, importance, block_size, zero_points)
    packed = pack_nibbles(integers)
    return (packed, scale, _packed_zero_points(zero_point)) if zero_points else (packed, scale)


def pack_nibbles(values: UInt8Array) -> UInt8Array:
    """Pack pairs of 4-bit values along the last axis into bytes, the first of a pair in the low half."""
    return np.bitwise_or(values[..., 0::2], np.left_shift(values[..., 1::2], np.uint8(4)))


def _packed_zero_points(zero_points: UInt8Array) -> UInt8Array:
    if zero_points.shape[1] % 2:
        zero_points = np.pad(zero_points, ((0, 0), (0, 1)))
    return pack_nibbles(zero_points)


def _blocks(weight: Float32Array, block_size: int) -> Float32Array:
    """View a matrix [out, in] as [out, blocks, block_size], padding the input with zeros to whole blocks."""
    rows, columns = weight.shape
    if columns % block_size:
        weight = np.pad(weight, ((0, 0), (0, block_size - columns % block_size)))
    return weight.reshape(rows, -1, block_size)


def _without_subnormals(scale: Float32Array) -> Float32Array:
    """Make scales zero whose inverse could be infinite; such a block is as good as zero."""
    scale[np.abs(scale) < _SMALLEST] = 0
    return scale


def _round_to_grid(
    grouped: Float32Array, scale: Float32Array, zero_point: Float32Array | np.float32, highest: int
) -> UInt8Array:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    integers = grouped * inverse[:, :, None]
    np.rint(integers, out=integers)
    integers += zero_point
    np.clip(integers, 0, highest, out=integers)
    return integers.astype(np.uint8)
