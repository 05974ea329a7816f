"""A weight file written piece by piece holds what it would hold written at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from edge_spec.export import packing
from edge_spec.export.weights import open_weight_file
from tiny_models import export_tiny

arrays_of_bytes = arrays(st.sampled_from([np.uint8, np.int8, np.float16, np.float32]), array_shapes(max_dims=2))


@given(arrays_of_bytes, st.sampled_from([0, -1]), st.integers(1, 4), st.booleans())
def test_pieces_written_in_any_order_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, axis: int, step: int, backwards: bool
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    starts = range(0, array.shape[axis], step)
    with open_weight_file(folder / "data") as weights:
        weights.append("before", np.arange(3, dtype=np.float32))
        region = weights.reserve("array", array.dtype, array.shape)
        behind = weights.append("behind", np.arange(5, dtype=np.uint8))
        for start in reversed(starts) if backwards else starts:
            piece = array[start : start + step] if axis == 0 else array[..., start : start + step]
            region.write(piece, start, axis)
    np.testing.assert_array_equal(region.tensor.numpy(), array)
    np.testing.assert_array_equal(behind.numpy(), np.arange(5))


def test_a_full_disk_is_an_error_wherever_a_write_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 10
    write = os.pwrite

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[:room], offset)
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    with open_weight_file(tmp_path / "data") as weights, pytest.raises(OSError, match="No space"):
        weights.append("array", np.zeros(11, np.uint8))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", ["fp32", "fp16", "w8a8", "int4"])
def test_how_many_rows_are_stored_at_a_time_makes_no_difference(
    recipe: str, tied: bool, tiny_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_bundle(recipe=recipe, tie_word_embeddings=tied)
    monkeypatch.setattr(packing, "_ELEMENTS_AT_ONCE", 1000)  # 15 rows of the vocabulary, 12 of a projection
    pieces = export_tiny(tmp_path, recipe=recipe, tie_word_embeddings=tied)
    for file in ("model.onnx.data", "model.onnx", "model.kv8.onnx"):
        assert (pieces / "target" / file).read_bytes() == (whole / "target" / file).read_bytes()
