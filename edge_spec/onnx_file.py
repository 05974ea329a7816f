"""Reads the structure of an ONNX file as the exporter writes it, and refuses everything else.

ONNX Runtime trusts the graphs it is given: what a file names it opens, what it declares it allocates. So a graph is
read here first, from the protobuf wire format (https://protobuf.dev/programming-guides/encoding/), which takes a few
pages and no dependency. Field numbers are those of onnx.proto3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

FLOAT, UINT8, INT8, INT32, INT64, BOOL, FLOAT16 = 1, 2, 3, 6, 7, 9, 10
ITEM_BYTES = {FLOAT: 4, UINT8: 1, INT8: 1, INT32: 4, INT64: 8, BOOL: 1, FLOAT16: 2}

Shape = tuple[int | str, ...]
Attribute = int | float | str | tuple[int, ...]
_Item = TypeVar("_Item")

_VARINT, _FIXED32, _BYTES = 0, 5, 2
_MOST_DIMENSIONS = 4
_MOST_INTEGERS = 8  # in a node's attribute
_LONGEST_NAME = 256


class GraphError(ValueError):
    """The file is no graph of this package; the message says what is wrong with it."""


@dataclass(frozen=True)
class External:
    """Where a tensor's bytes lie: a file beside the graph, and bytes from its start."""

    location: str
    offset: int
    length: int


@dataclass(frozen=True)
class Tensor:
    """An initializer: its bytes are in the graph (``raw``) or in another file."""

    dtype: int
    shape: tuple[int, ...]
    raw: bytes
    external: External | None


@dataclass(frozen=True)
class Declared:
    """Type and shape a graph declares for a value; a dimension is a number or a name."""

    dtype: int
    shape: Shape


@dataclass(frozen=True)
class Node:
    """One node; an input that is left out is an empty name."""

    domain: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class OnnxGraph:
    """A graph: values by name, nodes in their order."""

    opsets: Mapping[str, int]
    inputs: Mapping[str, Declared]
    outputs: Mapping[str, Declared]
    declared: Mapping[str, Declared]
    initializers: Mapping[str, Tensor]
    nodes: tuple[Node, ...]


def read_graph(data: bytes) -> OnnxGraph:
    """Read a whole ONNX file. Raises GraphError if it is damaged or holds what the exporter never writes."""
    model = _Message("the model", data, single=(1, 2, 3, 4, 5, 7), repeated=(8,))
    graph = _Message("the graph", model.bytes(7), single=(2,), repeated=(1, 5, 11, 12, 13))
    opsets = [_Message("an opset", item, single=(1, 2)) for item in model.each(8)]
    return OnnxGraph(
        opsets=_by_name("opset", ((opset.text(1), opset.integer(2)) for opset in opsets)),
        inputs=_by_name("input", map(_declared, graph.each(11))),
        outputs=_by_name("output", map(_declared, graph.each(12))),
        declared=_by_name("value", map(_declared, graph.each(13))),
        initializers=_by_name("initializer", map(_tensor, graph.each(5))),
        nodes=tuple(map(_node, graph.each(1))),
    )


def _by_name(what: str, pairs: Iterable[tuple[str, _Item]]) -> dict[str, _Item]:
    found: dict[str, _Item] = {}
    for name, item in pairs:
        if name in found:
            raise GraphError(f"the {what} {name!r} occurs twice")
        found[name] = item
    return found


def _node(data: memoryview) -> Node:
    node = _Message("a node", data, single=(3, 4, 7), repeated=(1, 2, 5))
    attributes = _by_name("attribute", map(_attribute, node.each(5)))
    inputs, outputs = (tuple(_text(item) for item in node.each(number)) for number in (1, 2))
    return Node(node.text(7), node.text(4), inputs, outputs, attributes)


def _attribute(data: memoryview) -> tuple[str, Attribute]:
    # Only numbers: tensors, graphs and the rest are other fields, and so refused.
    attribute = _Message("an attribute", data, single=(1, 2, 3, 4, 20), repeated=(8,))
    kind = attribute.integer(20)
    field = {1: 2, 2: 3, 3: 4, 7: 8}.get(kind)  # where a value of this type lies
    if not any(attribute.has(other) for other in (2, 3, 4, 8) if other != field):
        if kind == 1:
            return attribute.text(1), attribute.float32(2)
        if kind == 2:
            return attribute.text(1), attribute.integer(3)
        if kind == 3:
            return attribute.text(1), attribute.text(4)
        if kind == 7:
            return attribute.text(1), _integers(attribute.values(8), _MOST_INTEGERS, "an attribute", "integers")
    raise GraphError(f"the attribute {attribute.text(1)!r} is of type {kind}, expected a number or a text")


def _tensor(data: memoryview) -> tuple[str, Tensor]:
    tensor = _Message("an initializer", data, single=(2, 8, 9, 14), repeated=(1, 13))
    name, dtype = tensor.text(8), tensor.integer(2)
    if dtype not in ITEM_BYTES:
        raise GraphError(f"the initializer {name!r} has the type {dtype}, which no graph uses")
    shape = _dimensions(tensor, name)
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if tensor.integer(14) == 0:
        raw = bytes(tensor.bytes(9))
        if len(raw) != size or tensor.each(13):
            raise GraphError(f"the initializer {name!r} has {len(raw)} bytes, its shape needs {size}")
        return name, Tensor(dtype, shape, raw, None)
    entries = [_Message("external data", item, single=(1, 2)) for item in tensor.each(13)]
    place = _by_name("entry", ((entry.text(1), entry.text(2)) for entry in entries))
    if tensor.integer(14) != 1 or tensor.has(9) or place.keys() != {"location", "offset", "length"}:
        raise GraphError(f"the initializer {name!r} does not say where its bytes lie")
    offset, length = (_decimal(place[key]) for key in ("offset", "length"))
    if length != size:
        raise GraphError(f"the initializer {name!r} has {length} bytes, its shape needs {size}")
    return name, Tensor(dtype, shape, b"", External(place["location"], offset, length))


def _dimensions(tensor: _Message, name: str) -> tuple[int, ...]:
    shape = _integers(tensor.values(1), _MOST_DIMENSIONS, f"the initializer {name!r}", "dimensions")
    if any(not 0 < size < 1 << 40 for size in shape):
        raise GraphError(f"the initializer {name!r} has a dimension that no tensor has")
    return shape


def _integers(values: Iterable[int | memoryview], most: int, where: str, what: str) -> tuple[int, ...]:
    """Repeated integers, one by one or packed."""
    found: list[int] = []
    for item in values:
        found += [item] if isinstance(item, int) else _varints(item, most)
        if len(found) > most:
            raise GraphError(f"{where} has more than {most} {what}")
    return tuple(map(_signed, found))


def _declared(data: memoryview) -> tuple[str, Declared]:
    value = _Message("a value", data, single=(1, 2))
    tensor = _Message("a type", _Message("a type", value.bytes(2), single=(1,)).bytes(1), single=(1, 2))
    dimensions = [
        _Message("a dimension", item, single=(1, 2))
        for item in _Message("a shape", tensor.bytes(2), repeated=(1,)).each(1)
    ]
    if not tensor.has(2) or len(dimensions) > _MOST_DIMENSIONS:
        raise GraphError(f"the value {value.text(1)!r} is declared without a shape that values have")
    shape = tuple(item.text(2) if item.has(2) else item.integer(1) for item in dimensions)
    return value.text(1), Declared(tensor.integer(1), shape)


class _Message:
    """The fields of one message, by number; others than the given ones are refused, and so are repeated single ones."""

    def __init__(
        self, what: str, data: bytes | memoryview, single: tuple[int, ...] = (), repeated: tuple[int, ...] = ()
    ) -> None:
        self._what = what
        self._single: dict[int, int | memoryview] = {}
        self._repeated: dict[int, list[int | memoryview]] = {number: [] for number in repeated}
        for number, value in _fields(memoryview(data)):
            if number in self._repeated:
                self._repeated[number].append(value)
            elif number in single and number not in self._single:
                self._single[number] = value
            else:
                raise GraphError(f"{what} has the field {number}, which the exporter never writes, or has it twice")

    def has(self, number: int) -> bool:
        return number in self._single or bool(self._repeated.get(number))

    def integer(self, number: int) -> int:
        value = self._single.get(number, 0)
        if not isinstance(value, int):
            raise self._wrong(number)
        return _signed(value)

    def float32(self, number: int) -> float:
        value = self._single.get(number)
        if not isinstance(value, memoryview) or len(value) != 4:
            raise self._wrong(number)
        result: float = value.cast("f")[0]
        return result

    def bytes(self, number: int) -> memoryview:
        value = self._single.get(number, memoryview(b""))
        if not isinstance(value, memoryview):
            raise self._wrong(number)
        return value

    def text(self, number: int) -> str:
        return _text(self.bytes(number))

    def each(self, number: int) -> list[memoryview]:
        values = self.values(number)
        if not all(isinstance(value, memoryview) for value in values):
            raise self._wrong(number)
        return cast("list[memoryview]", values)

    def values(self, number: int) -> list[int | memoryview]:
        return self._repeated[number]

    def _wrong(self, number: int) -> GraphError:
        return GraphError(f"field {number} of {self._what} is of another type")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message in their order: integers, or the bytes of what is longer."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, position = _varint(data, position)
        elif kind == _FIXED32:
            length = 4
        else:
            raise GraphError("a field is of a kind that the exporter never writes")
        if length > end - position:
            raise GraphError("it ends inside a field")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, and where the next thing starts."""
    try:
        value = data[position]
        if value < 128:  # most of them
            return value, position + 1
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 63:
                raise GraphError("a number is longer than 64 bits")
    except IndexError:
        raise GraphError("it ends inside a number") from None
    return value & (1 << 64) - 1, position


def _varints(data: memoryview, most: int) -> list[int]:
    values: list[int] = []
    position = 0
    while position < len(data) and len(values) <= most:
        value, position = _varint(data, position)
        values.append(value)
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise GraphError(f"{text[:40]!r} is no number of bytes")
    return int(text)


def _text(value: memoryview) -> str:
    if len(value) > _LONGEST_NAME:
        raise GraphError(f"a name is longer than {_LONGEST_NAME} bytes")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise GraphError("a name is not UTF-8") from None
