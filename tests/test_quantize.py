"""What quantized matrices stand for: error bounds, padding, blocks without values, extreme values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from edge_spec.export.quantize import (
    pack_nibbles,
    quantize_blocks,
    quantize_blocks_with_zero_points,
    quantize_channels,
)

Matrix = npt.NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
# Rounding in float32 on the way to the grid, relative to the bound; and what is as good as zero.
SLACK = 1 + 1e-4
NOTHING = 128 * SMALLEST

ordinary = st.floats(-10, 10, width=32)
extreme = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, SMALLEST, -1e-40, 1e-30, 1.0, -3e38, LARGEST, -LARGEST])
matrices = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=150), elements=ordinary)
extremes = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=140), elements=extreme)
block_sizes = st.sampled_from([16, 32, 128])


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def restored(
    integers: npt.NDArray[np.uint8], scale: Matrix, zero: npt.NDArray[np.uint8] | int
) -> npt.NDArray[np.float64]:
    """Blocks [out, blocks, block size] as a matrix [out, blocks * block size]."""
    centred = integers.astype(np.float64) - (zero if isinstance(zero, int) else zero[:, :, None])
    return (centred * scale.astype(np.float64)[:, :, None]).reshape(len(integers), -1)


def channels(weight: Matrix, signed: bool) -> npt.NDArray[np.float64]:
    integers, scale = quantize_channels(weight, signed)
    assert integers.dtype == (np.int8 if signed else np.uint8)
    assert integers.shape == weight.T.shape and integers.flags.c_contiguous
    assert scale.dtype == np.float32 and scale.shape == (len(weight),)
    return (integers.T.astype(np.float64) - (0 if signed else 128)) * scale[:, None]


def symmetric(weight: Matrix, bits: int, block_size: int) -> tuple[npt.NDArray[np.float64], Matrix]:
    packed, scale = quantize_blocks(weight, bits, block_size)  # type: ignore[arg-type]
    blocks = -(-weight.shape[1] // block_size)
    assert packed.dtype == np.uint8 and packed.shape == (len(weight), blocks, block_size * bits // 8)
    assert scale.dtype == np.float32 and scale.shape == (len(weight), blocks)
    return restored(unpack(packed) if bits == 4 else packed, scale, 1 << (bits - 1)), scale


def with_zero_points(weight: Matrix, block_size: int) -> tuple[npt.NDArray[np.float64], Matrix]:
    packed, scale, zero = quantize_blocks_with_zero_points(weight, block_size)
    blocks = -(-weight.shape[1] // block_size)
    assert packed.dtype == zero.dtype == np.uint8 and scale.dtype == np.float32
    assert packed.shape == (len(weight), blocks, block_size // 2) and zero.shape == (len(weight), -(-blocks // 2))
    return restored(unpack(packed), scale, unpack(zero)[:, :blocks]), scale


def spread(scale: Matrix, block_size: int) -> npt.NDArray[np.float64]:
    """The step of every element, float64 [out, blocks * block size]."""
    return np.repeat(np.abs(scale.astype(np.float64)), block_size, axis=1)


def padded(weight: Matrix, block_size: int) -> Matrix:
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % block_size)))


@given(matrices, st.booleans())
def test_a_channel_is_off_by_half_a_step_at_most(weight: Matrix, signed: bool) -> None:
    step = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(channels(weight, signed) - weight) <= step / 2 * SLACK + NOTHING).all()


@given(matrices | extremes)
def test_signed_and_unsigned_channels_stand_for_the_same_values(weight: Matrix) -> None:
    np.testing.assert_array_equal(channels(weight, signed=True), channels(weight, signed=False))
    integers, _ = quantize_channels(weight, signed=True)
    # -128 would have no counterpart, and its product with 255 no room.
    assert integers.min() >= -127


@given(matrices, st.sampled_from([4, 8]), block_sizes)
def test_symmetric_blocks_are_off_by_half_a_step_but_at_the_short_end(
    weight: Matrix, bits: int, block_size: int
) -> None:
    values, scale = symmetric(weight, bits, block_size)
    wanted, step = padded(weight, block_size), spread(scale, block_size)
    # The end away from the value of largest magnitude lacks one step.
    clipped = wanted / np.where(scale == 0, 1, scale).repeat(block_size, axis=1) > 2 ** (bits - 1) - 1.5
    bound = np.where(clipped, step, step / 2)
    assert (np.abs(values - wanted) <= bound * SLACK + NOTHING).all()


@given(matrices, st.sampled_from([4, 8]), block_sizes)
def test_the_largest_magnitude_of_a_symmetric_block_is_kept(weight: Matrix, bits: int, block_size: int) -> None:
    values, _ = symmetric(weight, bits, block_size)
    largest = np.abs(padded(weight, block_size)).reshape(len(weight), -1, block_size).max(axis=2)
    kept = np.abs(values).reshape(len(weight), -1, block_size).max(axis=2)
    np.testing.assert_allclose(kept, largest, rtol=1e-6, atol=NOTHING)


@given(matrices, block_sizes)
def test_blocks_with_zero_points_are_off_by_half_a_step(weight: Matrix, block_size: int) -> None:
    values, scale = with_zero_points(weight, block_size)
    assert (np.abs(values - padded(weight, block_size)) <= spread(scale, block_size) / 2 * SLACK + NOTHING).all()


@given(matrices, block_sizes)
def test_zero_stays_zero(weight: Matrix, block_size: int) -> None:
    # What pads a block must not count, and weights pruned to zero must stay so.
    weight[:, ::3] = 0
    zeros = padded(weight, block_size) == 0
    assert (symmetric(weight, 4, block_size)[0][zeros] == 0).all()
    assert (symmetric(weight, 8, block_size)[0][zeros] == 0).all()
    assert (with_zero_points(weight, block_size)[0][zeros] == 0).all()
    assert (channels(weight, signed=False)[weight == 0] == 0).all()


@given(extremes, block_sizes)
@pytest.mark.filterwarnings("error")
def test_extreme_values_stay_finite_and_close(weight: Matrix, block_size: int) -> None:
    wanted = padded(weight, block_size)
    largest = np.abs(wanted).reshape(len(weight), -1, block_size).max(axis=2).astype(np.float64)
    bound = np.repeat(largest, block_size, axis=1) / 7 + NOTHING
    for values, _ in (
        symmetric(weight, 4, block_size),
        symmetric(weight, 8, block_size),
        with_zero_points(weight, block_size),
    ):
        assert (np.abs(values - wanted) <= bound).all()
    step = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(channels(weight, signed=True) - weight) <= step + NOTHING).all()


@pytest.mark.parametrize("columns", [32, 33, 64, 96, 112])
@pytest.mark.parametrize(
    "quantize",
    [
        lambda weight: symmetric(weight, 4, 32)[0],
        lambda weight: symmetric(weight, 8, 32)[0],
        lambda weight: with_zero_points(weight, 32)[0],
        lambda weight: channels(weight, signed=True),
        lambda weight: channels(weight, signed=False),
    ],
    ids=["int4", "int8", "int4-zero-points", "channels-signed", "channels-unsigned"],
)
@pytest.mark.filterwarnings("error")
def test_rows_and_blocks_of_zeros(quantize: Callable[[Matrix], npt.NDArray[np.float64]], columns: int) -> None:
    weight = np.random.default_rng(0).standard_normal((4, columns), np.float32)
    weight[1] = 0
    weight[2, :32] = 0
    values = quantize(weight)
    assert (values[1] == 0).all() and (values[2, :32] == 0).all()
    assert (values[0] != 0).any() and (values[3] != 0).any()


def test_values_of_one_sign_use_the_whole_grid() -> None:
    weight = np.linspace(0, 15, 32, dtype=np.float32)[None]
    for sign in (1, -1):
        values, scale = with_zero_points(sign * weight, 32)
        assert scale[0, 0] == 1
        np.testing.assert_array_equal(values, np.rint(sign * weight))


@pytest.mark.parametrize("columns", [128, 160, 304])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_each_block_has_a_scale_and_a_zero_point_of_its_own(block_size: int, columns: int) -> None:
    # Every 16 weights span a whole grid, those of the next block another.
    step = 1.0 + np.arange(columns, dtype=np.float32) // block_size
    weight = step * np.resize(np.arange(-5, 11, dtype=np.float32), (3, columns))
    values, scale = with_zero_points(weight, block_size)
    np.testing.assert_array_equal(scale, np.tile(step[::block_size], (3, 1)))
    np.testing.assert_array_equal(values[:, :columns], weight)


def test_the_first_nibble_is_the_low_half() -> None:
    np.testing.assert_array_equal(pack_nibbles(np.array([[1, 2, 15, 0]], np.uint8)), [[0x21, 0x0F]])


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 8).map(lambda n: 2 * n)), elements=st.integers(0, 15))
)
def test_packed_nibbles_can_be_told_apart(nibbles: npt.NDArray[np.uint8]) -> None:
    np.testing.assert_array_equal(unpack(pack_nibbles(nibbles)), nibbles)
