"""The external-data file of a graph, written front to back while the model streams through."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# Page-aligned tensors can be mapped into memory directly.
_ALIGNMENT = 4096


class Region:
    """Room for one array in a weight file, so that none of it need be in memory longer than it takes to write it.

    Attributes:
        tensor: refers to the bytes, written or not.
    """

    def __init__(self, file: int, tensor: ir.ExternalTensor) -> None:
        """Write through the descriptor ``file`` to where ``tensor`` lies."""
        self.tensor = tensor
        self._file = file

    def write(self, piece: npt.NDArray[Any], start: int, axis: int) -> None:
        """Write a piece of the array: all of it but along ``axis``, the first or the last, and from ``start`` on there.

        Raises:
            OSError: the disk is full, or the file cannot be written.
        """
        offset, shape = self.tensor.offset, self.tensor.shape.numpy()
        assert offset is not None  # set by the file
        if axis == 0 or piece.shape == shape or piece.ndim == 1:
            inner = math.prod(shape[1:]) * piece.itemsize
            self._write(np.ascontiguousarray(piece), offset + start * inner)
            return
        for row, values in enumerate(np.ascontiguousarray(piece).reshape(-1, piece.shape[-1])):
            self._write(values, offset + (row * shape[-1] + start) * piece.itemsize)

    def _write(self, values: npt.NDArray[Any], offset: int) -> None:
        data = values.reshape(-1).view(np.uint8).data
        while len(data):
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written


class WeightFile:
    """Appends tensors to one file and hands out references to them, so that several graphs can share the bytes."""

    def __init__(self, path: Path) -> None:
        """Create ``path``; graphs that refer to it must lie in the same folder."""
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._end = 0

    def append(self, name: str, array: npt.NDArray[Any]) -> ir.ExternalTensor:
        """Write one array and return the tensor that refers to its bytes."""
        region = self.reserve(name, array.dtype, array.shape)
        region.write(array, 0, 0)
        return region.tensor

    def reserve(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Region:
        """Make room for one array, which is then to be written piece by piece."""
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        length = math.prod(shape) * dtype.itemsize
        self._end = offset + length
        return Region(self._file.fileno(), self._reference(name, ir.DataType.from_numpy(dtype), shape, offset, length))

    def alias(self, tensor: ir.ExternalTensor, name: str, shape: Sequence[int]) -> ir.ExternalTensor:
        """Return another view of bytes already written, under a new name and shape."""
        assert tensor.offset is not None and tensor.length is not None  # set by append
        return self._reference(name, tensor.dtype, shape, tensor.offset, tensor.length)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _reference(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], offset: int, length: int
    ) -> ir.ExternalTensor:
        return ir.ExternalTensor(
            self.path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self.path.parent
        )


@contextmanager
def open_weight_file(path: Path) -> Iterator[WeightFile]:
    """Open a weight file for writing and close it whatever happens."""
    weights = WeightFile(path)
    try:
        yield weights
    finally:
        weights.close()
