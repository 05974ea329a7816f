"""A safetensors file on disk: where its tensors lie, and their rows as float32.

The numpy side of the ``safetensors`` package cannot read bfloat16, which most checkpoints are stored in, hence this
reader of the same format (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.errors import CheckpointError, UnsupportedError

# Every element type the format knows, so that an unsupported one is told from a damaged file.
_ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64}
_ITEM_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_ITEM_BITS |= {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64}
_INTEGERS: Mapping[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
_READABLE: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# Bytes. The format allows 100 MB; headers of real checkpoints have some hundred kilobytes.
_LARGEST_HEADER = 32 << 20
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``offset`` from the start of the file and size, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class SafetensorsFile:
    """The header of a safetensors file, and its tensors' rows.

    Attributes:
        path: the file.
        tensors: every tensor by its name in the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError if the file is missing, cut short or no safetensors file."""
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                    raise self._damaged(f"its header claims {length} bytes, the file has {size}")
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        self.tensors: Mapping[str, StoredTensor] = {
            name: self._entry(name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"
        }
        self._refuse_overlaps()

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows ``start:stop`` of one tensor as float32 (a vector's elements are its rows).

        Raises:
            UnsupportedError: the elements are not F32, F16 or BF16.
            CheckpointError: the file has become shorter or unreadable since it was opened.
        """
        tensor = self.tensors[name]
        self.require_readable(name)
        dtype, columns = _READABLE[tensor.dtype], math.prod(tensor.shape[1:])
        data = self._read(name, dtype, start * columns, (stop - start) * columns)
        if tensor.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            values: npt.NDArray[np.float32] = np.left_shift(data, 16, dtype=np.uint32).view(np.float32)
        else:
            values = data.astype(np.float32, copy=False)
        return values.reshape(stop - start, *tensor.shape[1:])

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return one tensor of whole numbers as int64.

        Raises:
            UnsupportedError: the elements are not I64 or I32.
            CheckpointError: the file has become shorter or unreadable since it was opened.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _INTEGERS:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is stored as {tensor.dtype}, expected one of {', '.join(_INTEGERS)}"
            )
        data = self._read(name, _INTEGERS[tensor.dtype], 0, math.prod(tensor.shape))
        return data.astype(np.int64).reshape(tensor.shape)

    def _read(self, name: str, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
        """Return some elements of a tensor as they are stored."""
        try:
            with self.path.open("rb") as file:
                data = np.fromfile(file, dtype, count, offset=self.tensors[name].offset + start * dtype.itemsize)
        except OSError as error:
            raise CheckpointError(f"cannot read {name!r} from {self.path}: {error.strerror or error}") from error
        if data.size != count:
            raise CheckpointError(f"{self.path} ends inside tensor {name!r}; download it again")
        return data

    def require_readable(self, name: str) -> None:
        """Raise UnsupportedError if the elements of a tensor are not F32, F16 or BF16."""
        if self.tensors[name].dtype not in _READABLE:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is stored as {self.tensors[name].dtype}; supported are "
                + ", ".join(_READABLE)
            )

    def _refuse_overlaps(self) -> None:
        placed = sorted((tensor.offset, tensor.offset + tensor.bytes, name) for name, tensor in self.tensors.items())
        for (_, end, name), (start, _, other) in pairwise(item for item in placed if item[0] < item[1]):
            if start < end:
                raise self._damaged(f"the tensors {name[:100]!r} and {other[:100]!r} share bytes")

    def _entry(self, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = (
                entry["dtype"],
                tuple(entry["shape"][: _MOST_DIMENSIONS + 1]),
                entry["data_offsets"],
            )
            bits = math.prod(shape) * _ITEM_BITS[dtype]
            sound = (
                len(shape) <= _MOST_DIMENSIONS
                and begin >= 0
                and min(shape, default=0) >= 0
                and (end - begin) * 8 == bits
            )
        except (KeyError, TypeError, ValueError):
            sound = False
            begin = end = 0
            shape = ()
        if not sound or not all(type(number) is int for number in (begin, end, *shape)):
            raise self._damaged(f"the entry of tensor {name!r} is {str(entry)[:100]}")
        if data_start + end > size:
            raise self._damaged(f"tensor {name!r} ends at byte {data_start + end}, the file has {size}")
        return StoredTensor(dtype, shape, data_start + begin, end - begin)

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no safetensors file, damaged or cut short: {reason}; download it again")
