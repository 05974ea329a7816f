"""The kinds of nodes that the exporter writes: what each is given, and the type and shape of what comes out.

Types are ONNX's numbers for them. A new kind of node in :mod:`edge_spec.export.graph` needs a rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.bundle import ArchitectureRecord
from edge_spec.onnx_file import FLOAT, FLOAT16, INT8, INT64, UINT8, Declared, Shape

CONTRIB = "com.microsoft"

_BLOCK_SIZES = (16, 32, 64, 128, 256)
_FLOATS = (FLOAT, FLOAT16)

Inputs = Sequence[Declared | None]
Attributes = Mapping[str, int | float | str]


class Surroundings(Protocol):
    """What a rule may ask about the graph.

    Attributes:
        facts: sizes of the model.
        float: type of activations.
        tree: whether attention takes positions and a bias.
        positions: rows that the rotary tables must have more than.
        cache: keys or values of one layer.
        quantized_cache: whether they are integers with a scale for each channel.
    """

    facts: ArchitectureRecord
    float: int
    tree: bool
    positions: int
    cache: Declared
    quantized_cache: bool

    def name(self, value: Declared | None) -> str:
        """What an input of the node at hand is called."""
        ...

    def contents(self, value: Declared | None) -> bytes:
        """The bytes of a constant in the graph; none for other values."""
        ...


@dataclass(frozen=True)
class Rule:
    """What a kind of node is given, and what comes out."""

    inputs: tuple[int, ...]
    outputs: int
    attributes: Mapping[str, Sequence[int | str] | type]
    shape: Callable[[Surroundings, Inputs, Attributes], Sequence[Declared]]
    optional: tuple[str, ...] = ()


class MismatchError(Exception):
    """The inputs of a node do not fit each other."""


def _need(condition: bool) -> None:
    if not condition:
        raise MismatchError


def _given(value: Declared | None, dtype: int | tuple[int, ...], shape: Shape | None = None) -> Declared:
    """Return an input, which must be there, of such a type, and of that shape if one is named."""
    if value is None or value.dtype not in ((dtype,) if isinstance(dtype, int) else dtype):
        raise MismatchError
    _need(shape is None or value.shape == shape)
    return value


def _columns(value: Declared) -> int:
    """Size of the last dimension."""
    last = value.shape[-1] if value.shape else None
    if not isinstance(last, int):
        raise MismatchError
    return last


def _gather(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    data, indices = _given(inputs[0], _FLOATS), _given(inputs[1], INT64)
    if attributes["axis"] == 0:
        _need(graph.name(inputs[1]) == "input_ids")
        _need(data.shape == (graph.facts.readable_ids, graph.facts.hidden_size))
        return [Declared(data.dtype, (*indices.shape, _columns(data)))]
    _need(graph.name(inputs[1]) == "logit_rows" and data.shape[:2] == (1, "rows") and len(data.shape) == 3)
    return [Declared(data.dtype, (1, "logit_rows", _columns(data)))]


def _gather_blocks(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    rows, hidden = graph.facts.readable_ids, graph.facts.hidden_size
    bits, block = int(attributes["bits"]), int(attributes["block_size"])
    _need(graph.name(inputs[1]) == "input_ids")
    blocks = -(-hidden // block)
    _given(inputs[0], UINT8, (rows, hidden * bits // 8))
    scale = _given(inputs[2], _FLOATS, (rows, blocks))
    if len(inputs) == 4:
        _given(inputs[3], UINT8, (rows, -(-blocks * bits // 8)))
    return [Declared(scale.dtype, (1, "rows", hidden))]


def _cast(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [Declared(int(attributes["to"]), _given(inputs[0], _FLOATS).shape)]


def _alike(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [_given(inputs[0], _FLOATS)]


def _broadcast(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = _given(inputs[0], _FLOATS)
    second = _given(inputs[1], first.dtype)
    last = first.shape[-1:]
    # The second never makes the first larger.
    _need(second.shape in (first.shape, (*first.shape[:-1], 1), last, (1,), ()))
    return [first]


def _norm(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _given(inputs[1], x.dtype, (_columns(x),))
    return [x]


def _skip_norm(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _given(inputs[1], x.dtype, x.shape)
    _given(inputs[2], x.dtype, (_columns(x),))
    statistic = Declared(FLOAT, (*x.shape[:-1], 1))
    return [x, statistic, statistic, x]


def _split(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _need(_columns(x) % 2 == 0)
    return [Declared(x.dtype, (*x.shape[:-1], _columns(x) // 2))] * 2


def _matmul(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    weight = _given(inputs[1], x.dtype)
    _need(len(x.shape) == 3 and len(weight.shape) == 2 and weight.shape[0] == _columns(x))
    return [Declared(x.dtype, (*x.shape[:-1], _columns(weight)))]


def _matmul_blocks(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    outputs, block = int(attributes["N"]), int(attributes["block_size"])
    blocks = -(-_columns(x) // block)
    _need(_columns(x) == attributes["K"] and len(x.shape) == 3)
    _given(inputs[1], UINT8, (outputs, blocks, block // 2))
    _given(inputs[2], x.dtype, (outputs, blocks))
    if len(inputs) == 4:
        _given(inputs[3], UINT8, (outputs, -(-blocks // 2)))
    return [Declared(x.dtype, (*x.shape[:-1], outputs))]


def _matmul_integers(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x, weight = _given(inputs[0], UINT8), _given(inputs[1], (UINT8, INT8))
    _need(len(x.shape) == 3 and len(weight.shape) == 2 and weight.shape[0] == _columns(x))
    _given(inputs[2], FLOAT, ())
    _given(inputs[3], FLOAT, (_columns(weight),))
    _given(inputs[4], UINT8, ())
    _given(inputs[5], weight.dtype, ())
    return [Declared(FLOAT, (*x.shape[:-1], _columns(weight)))]


def _quantize(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    _given(inputs[1], FLOAT, ())
    _given(inputs[2], UINT8, ())
    return [Declared(UINT8, x.shape)]


def _constant(graph: Surroundings, value: Declared | None, number: int) -> None:
    _given(value, INT64, (1,))
    _need(graph.contents(value) == number.to_bytes(8, "little", signed=True))


def _maximum(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    _need(len(x.shape) == 3)
    _constant(graph, inputs[1], -1)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _first_column(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    for value, number in zip(inputs[1:], (0, 1, -1), strict=True):
        _constant(graph, value, number)
    _need(len(x.shape) == 3)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _pad(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _need([graph.name(value) for value in inputs[:2]] == ["tree_bias", "tree_bias_padding"] and inputs[2] is None)
    _constant(graph, inputs[3], 3)
    return [Declared(graph.float, (1, 1, "rows", "total"))]


def _attention(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    facts, dtype = graph.facts, graph.float
    _need((attributes["num_heads"], attributes["kv_num_heads"]) == (facts.heads, facts.kv_heads))
    _given(inputs[0], dtype, (1, "rows", (facts.heads + 2 * facts.kv_heads) * facts.head_size))
    _need(inputs[1] is None and inputs[2] is None)
    prefix, _, part = graph.name(inputs[3]).rpartition(".")
    _need(part == "key" and graph.name(inputs[4]) == f"{prefix}.value" and prefix.startswith("past_key_values."))
    _need([graph.name(value) for value in inputs[5:7]] == ["seqlens_k", "total_sequence_length"])
    for table in inputs[7:9]:
        # Rows are looked up by position, which the kernel does not compare with the table's length.
        rows, columns = _given(table, dtype).shape if len(_given(table, dtype).shape) == 2 else (0, 0)
        _need(isinstance(rows, int) and rows > graph.positions and columns == facts.head_size // 2)
    _need(len(inputs) == (14 if graph.quantized_cache else 11 if graph.tree else 9))
    _need(attributes.keys().isdisjoint(_CACHE_ATTRIBUTES) != graph.quantized_cache)
    if graph.quantized_cache:
        _need(attributes.keys() >= _CACHE_ATTRIBUTES.keys() and inputs[11] is None)
        for scales in inputs[12:]:
            _given(scales, FLOAT, (1, facts.kv_heads, 1, facts.head_size))
    if graph.tree:
        _need(graph.name(inputs[9]) == "position_ids")
        _given(inputs[10], dtype, (1, 1, "rows", "total"))
    return [Declared(dtype, (1, "rows", facts.heads * facts.head_size)), graph.cache, graph.cache]


# How keys and values are stored in 8 bits; together or not at all.
_CACHE_ATTRIBUTES: dict[str, Sequence[int | str]] = {
    "k_quant_type": ("PER_CHANNEL",),
    "v_quant_type": ("PER_CHANNEL",),
    "kv_cache_bit_width": (8,),
}

# Operators, their numbers of inputs and outputs, and the values their attributes may have.
RULES: dict[tuple[str, str], Rule] = {
    ("", "Gather"): Rule((2,), 1, {"axis": (0, 1)}, _gather),
    ("", "Cast"): Rule((1,), 1, {"to": _FLOATS}, _cast),
    ("", "Abs"): Rule((1,), 1, {}, _alike),
    ("", "Sigmoid"): Rule((1,), 1, {}, _alike),
    ("", "Add"): Rule((2,), 1, {}, _broadcast),
    ("", "Mul"): Rule((2,), 1, {}, _broadcast),
    ("", "Div"): Rule((2,), 1, {}, _broadcast),
    ("", "RMSNormalization"): Rule((2,), 1, {"axis": (-1,), "epsilon": float}, _norm),
    ("", "Split"): Rule((1,), 2, {"axis": (-1,), "num_outputs": (2,)}, _split),
    ("", "MatMul"): Rule((2,), 1, {}, _matmul),
    ("", "ReduceMax"): Rule((2,), 1, {"keepdims": (1,)}, _maximum),
    ("", "Slice"): Rule((4,), 1, {}, _first_column),
    ("", "Pad"): Rule((4,), 1, {}, _pad),
    (CONTRIB, "QuantizeLinear"): Rule((3,), 1, {}, _quantize),
    (CONTRIB, "MatMulIntegerToFloat"): Rule((6,), 1, {}, _matmul_integers),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): Rule((3,), 4, {"epsilon": float}, _skip_norm),
    (CONTRIB, "MatMulNBits"): Rule(
        (3, 4),
        1,
        {"K": int, "N": int, "bits": (4,), "block_size": _BLOCK_SIZES, "accuracy_level": (4,)},
        _matmul_blocks,
        optional=("accuracy_level",),
    ),
    (CONTRIB, "GatherBlockQuantized"): Rule(
        (3, 4),
        1,
        {"bits": (4, 8), "block_size": _BLOCK_SIZES, "gather_axis": (0,), "quantize_axis": (1,)},
        _gather_blocks,
    ),
    (CONTRIB, "GroupQueryAttention"): Rule(
        (9, 11, 14),
        3,
        {"num_heads": int, "kv_num_heads": int, "do_rotary": (1,), **_CACHE_ATTRIBUTES},
        _attention,
        optional=tuple(_CACHE_ATTRIBUTES),
    ),
}
