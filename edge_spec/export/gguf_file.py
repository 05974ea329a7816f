"""A GGUF file on disk: its metadata, and where its tensors lie, every number checked before it is believed.

The container is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here
rather than by ``gguf.GGUFReader``, which takes seconds for a large vocabulary and reports a truncated file as an
index error; type numbers and block sizes come from the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.metadata import Metadata

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
# Far above any model: keys, tensors, elements of all arrays together, and bytes of the header and of one text in it.
_MOST_ENTRIES = 1 << 16
_MOST_ELEMENTS = 1 << 23
_LARGEST_HEADER = 1 << 28
_LARGEST_TEXT = 1 << 22
_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is row-major; ``offset`` and ``row_bytes`` are in bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows: of the matrix, or 1 for a vector."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """The header of a GGUF file, and raw access to its tensors.

    Attributes:
        path: the file.
        metadata: every key-value pair; arrays are lists.
        tensors: every tensor by its GGUF name.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: the file is missing, no GGUF file, cut short or inconsistent.
            UnsupportedError: the file's version or byte order, or a tensor's type, is unknown.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                start = file.read(len(MAGIC))
                if start != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file: it starts with {start!r}, expected {MAGIC!r}")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    values, self.tensors = _Header(path, data).parse()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        self.metadata = Metadata(values, str(path))

    def read_rows(self, tensor: GgufTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the encoded rows ``start:stop`` of one tensor, uint8 [stop - start, row_bytes].

        Raises:
            CheckpointError: the file has become shorter or unreadable since it was opened.
        """
        count = (stop - start) * tensor.row_bytes
        try:
            with self.path.open("rb") as file:
                data = np.fromfile(file, np.uint8, count, offset=tensor.offset + start * tensor.row_bytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {tensor.name!r} from {self.path}: {error.strerror or error}") from error
        if data.size != count:
            raise CheckpointError(f"{self.path} ends inside tensor {tensor.name!r}; download or convert it again")
        return data.reshape(stop - start, tensor.row_bytes)


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = len(MAGIC)
        self._elements = 0

    def parse(self) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(struct.pack(">I", version), "little") in _VERSIONS
            reason = "is big-endian" if swapped else f"has version {version}"
            raise UnsupportedError(f"{self._path} {reason}; supported are little-endian files of version 2 and 3")
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        for count, what in ((tensor_count, "tensors"), (pair_count, "metadata keys")):
            if count > _MOST_ENTRIES:
                raise self._damaged(f"it claims {count} {what}, expected at most {_MOST_ENTRIES}")
        values: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in values:
                raise self._damaged(f"metadata key {key[:100]!r} occurs twice")
            values[key] = self._value(key, self._value_type(key))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        return values, self._place(entries, values.get("general.alignment", _DEFAULT_ALIGNMENT))

    def _place(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: object
    ) -> dict[str, GgufTensor]:
        """Turn offsets within the data section into offsets within the file, and check that the file holds them."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, expected a power of two")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            if shape[-1] % block:
                raise self._damaged(
                    f"rows of {name!r} have {shape[-1]} elements, no multiple of the block size {block}"
                )
            tensor = GgufTensor(name, kind, shape, data_start + offset, shape[-1] // block * block_bytes)
            end = tensor.offset + tensor.rows * tensor.row_bytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{self._path} is cut short: tensor {name!r} ends at byte {end}, the file has {len(self._data)}; "
                    "download it again"
                )
            tensors[name] = tensor
        placed = sorted((t.offset, t.offset + t.rows * t.row_bytes, t.name) for t in tensors.values())
        for (_, stop, name), (begin, _, other) in pairwise(placed):
            if begin < stop:
                raise self._damaged(f"the tensors {name[:100]!r} and {other[:100]!r} share bytes")
        return tensors

    def _tensor_entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions, expected 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise self._damaged(f"tensor {name!r} is empty: its shape is {shape}")
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedError(f"{self._path}: tensor {name!r} has the unknown type number {number}") from None
        return name, kind, shape, offset

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"metadata key {key!r} has the unknown value type {number}") from None

    def _value(self, key: str, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._number(_SCALAR_FORMATS[kind])
        kind, count = self._value_type(key), self._number("Q")
        if kind is GGUFValueType.ARRAY:
            raise UnsupportedError(f"{self._path}: metadata key {key!r} holds nested arrays")
        # Every element takes at least a byte, so a larger count is a lie not worth allocating for.
        if count > len(self._data) - self._position:
            raise self._damaged(f"metadata array {key!r} claims {count} elements")
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise self._damaged(f"its metadata arrays have more than {_MOST_ELEMENTS} elements")
        if kind is GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        return list(self._unpack(f"<{count}{_SCALAR_FORMATS[kind]}"))

    def _string(self) -> str:
        length = self._number("Q")
        end = self._position + length
        if end > len(self._data) or length > _LARGEST_TEXT:
            raise self._damaged(f"a string at byte {self._position} claims {length} bytes")
        raw, self._position = self._data[self._position : end], end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"a string before byte {end} is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return self._unpack("<" + code)[0]

    def _unpack(self, format_: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(format_, self._data, self._position)
        except struct.error:
            raise self._damaged("it ends inside its header") from None
        self._position += struct.calcsize(format_)
        if self._position > _LARGEST_HEADER:
            raise self._damaged(f"its header is longer than {_LARGEST_HEADER} bytes")
        return values

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged or cut short: {reason}; download or convert it again")
