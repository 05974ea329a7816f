"""The external-data file of a graph, written front to back while the model streams through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# Page-aligned tensors can be mapped into memory directly.
_ALIGNMENT = 4096


class WeightFile:
    """Appends tensors to one file and hands out references to them, so that several graphs can share the bytes."""

    def __init__(self, path: Path) -> None:
        """Create ``path``; graphs that refer to it must lie in the same folder."""
        self.path = path
        self._file = path.open("wb")

    def append(self, name: str, array: npt.NDArray[Any]) -> ir.ExternalTensor:
        """Write one array and return the tensor that refers to its bytes."""
        offset = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return self._reference(name, ir.DataType.from_numpy(array.dtype), array.shape, offset, array.nbytes)

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
