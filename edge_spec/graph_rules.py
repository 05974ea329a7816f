"""The kinds of nodes that the exporter writes: what each is given, and the type and shape of what comes out.

Types are ONNX's numbers for them. A new kind of node in :mod:`edge_spec.export.graph` needs a rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.bundle import ArchitectureRecord
from edge_spec.onnx_file import BOOL, FLOAT, FLOAT16, INT8, INT64, UINT8, Declared, Shape

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
    outputs: tuple[int, ...]
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
    data, indices = _given(inputs[0], (*_FLOATS, INT64)), _given(inputs[1], INT64)
    if data.dtype == INT64:
        return [_first_entry(graph, inputs, attributes)]
    if attributes["axis"] == 0:
        _need(graph.name(inputs[1]) == "input_ids")
        _need(data.shape == (graph.facts.logits_size, graph.facts.hidden_size))
        return [Declared(data.dtype, (*indices.shape, _columns(data)))]
    _need(graph.name(inputs[1]) == "logit_rows" and data.shape[:2] == (1, "rows") and len(data.shape) == 3)
    return [Declared(data.dtype, (1, "logit_rows", _columns(data)))]


def _first_entry(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Declared:
    """How many tokens the cache holds, or the position of the call's first row."""
    _number(graph, inputs[1], 0)
    name, axis = graph.name(inputs[0]), attributes["axis"]
    _need((name, axis) in (("tree_bias_padding", 0), ("position_ids", 1)))
    return Declared(INT64, () if axis == 0 else (1,))


def _gather_blocks(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    rows, hidden = graph.facts.logits_size, graph.facts.hidden_size
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
    first = _given(inputs[0], (*_FLOATS, INT64))
    if first.dtype == INT64:
        _given(inputs[1], INT64, ())
        return [_given(first, INT64, (1, "rows"))]
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
    x, facts = _given(inputs[0], _FLOATS), graph.facts
    if len(inputs) == 1:
        _need(_columns(x) % 2 == 0 and attributes.get("num_outputs") == 2)
        return [Declared(x.dtype, (*x.shape[:-1], _columns(x) // 2))] * 2
    sizes = [heads * facts.head_size for heads in (facts.heads, facts.kv_heads, facts.kv_heads)]
    _need(_columns(x) == sum(sizes) and "num_outputs" not in attributes)
    _constants(graph, inputs[1], *sizes)
    return [Declared(x.dtype, (*x.shape[:-1], size)) for size in sizes]


def _reshape(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    """Rows into heads, or heads into rows."""
    x, size = _given(inputs[0], _FLOATS), graph.facts.head_size
    if len(x.shape) == 3:
        _need(x.shape[:2] == (1, "rows") and _columns(x) % size == 0)
        heads = _columns(x) // size
        _constants(graph, inputs[1], 0, 0, heads, size)
        return [Declared(x.dtype, (1, "rows", heads, size))]
    _need(len(x.shape) == 4 and x.shape[:2] == (1, "rows") and isinstance(x.shape[2], int))
    columns = int(x.shape[2]) * _columns(x)
    _constants(graph, inputs[1], 0, 0, columns)
    return [Declared(x.dtype, (1, "rows", columns))]


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


def _constants(graph: Surroundings, value: Declared | None, *numbers: int) -> None:
    _given(value, INT64, (len(numbers),))
    _need(graph.contents(value) == b"".join(number.to_bytes(8, "little", signed=True) for number in numbers))


def _number(graph: Surroundings, value: Declared | None, number: int) -> None:
    _given(value, INT64, ())
    _need(graph.contents(value) == number.to_bytes(8, "little", signed=True))


def _maximum(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    _need(len(x.shape) == 3)
    _constants(graph, inputs[1], -1)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _first_column(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    for value, number in zip(inputs[1:], (0, 1, -1), strict=True):
        _constants(graph, value, number)
    _need(len(x.shape) == 3)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _pad(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _need([graph.name(value) for value in inputs[:2]] == ["tree_bias", "tree_bias_padding"] and inputs[2] is None)
    _constants(graph, inputs[3], 3)
    return [Declared(graph.float, (1, 1, "rows", "total"))]


# The chain of nodes that makes the bias of layers that see a window (edge_spec/export/window_bias.py).


def _range(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _number(graph, inputs[0], 0)
    _number(graph, inputs[2], 1)
    _given(inputs[1], INT64, ())
    _need(not graph.contents(inputs[1]))  # only what the runtime says is in the cache
    return [Declared(INT64, ("past",))]


def _squeeze(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _given(inputs[0], INT64, (1, "rows"))
    _constants(graph, inputs[1], 0)
    return [Declared(INT64, ("rows",))]


def _unsqueeze(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _given(inputs[0], INT64, (1, "rows"))
    _constants(graph, inputs[1], 2)
    return [Declared(INT64, (1, "rows", 1))]


def _concatenate(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _given(inputs[0], INT64, ("past",))
    _given(inputs[1], INT64, ("rows",))
    return [Declared(INT64, ("total",))]


def _subtract(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = _given(inputs[0], INT64)
    if first.shape == (1, "rows"):
        _given(inputs[1], INT64, (1,))
        return [first]
    _given(first, INT64, (1, "rows", 1))
    _given(inputs[1], INT64, ("total",))
    return [Declared(INT64, (1, "rows", "total"))]


def _less(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _given(inputs[0], INT64, (1, "rows", "total"))
    _given(inputs[1], INT64, ())
    return [Declared(BOOL, (1, "rows", "total"))]


def _where(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _given(inputs[0], BOOL, (1, "rows", "total"))
    bias = _given(inputs[1], graph.float, (1, 1, "rows", "total"))
    _given(inputs[2], graph.float, ())
    return [bias]


def _attention(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    facts, dtype = graph.facts, graph.float
    _need((attributes["num_heads"], attributes["kv_num_heads"]) == (facts.heads, facts.kv_heads))
    heads = (facts.heads, facts.kv_heads, facts.kv_heads)
    if inputs[1] is None:
        _given(inputs[0], dtype, (1, "rows", sum(heads) * facts.head_size))
        _need(inputs[2] is None)
    else:
        for value, count in zip(inputs[:3], heads, strict=True):
            _given(value, dtype, (1, "rows", count * facts.head_size))
    prefix, _, part = graph.name(inputs[3]).rpartition(".")
    _need(part == "key" and graph.name(inputs[4]) == f"{prefix}.value" and prefix.startswith("past_key_values."))
    _need([graph.name(value) for value in inputs[5:7]] == ["seqlens_k", "total_sequence_length"])
    if attributes["do_rotary"]:
        for table in inputs[7:9]:
            # Rows are looked up by position, which the kernel does not compare with the table's length.
            shape = _given(table, dtype).shape
            rows, columns = shape if len(shape) == 2 else (0, 0)
            _need(isinstance(rows, int) and rows > graph.positions)
            _need(columns in [rope.size // 2 for rope in facts.ropes])
        _need(_given(inputs[7], dtype).shape == _given(inputs[8], dtype).shape)
    else:
        _need(inputs[7] is None and inputs[8] is None)
    _need(len(inputs) == (14 if graph.quantized_cache else 11 if graph.tree else 9))
    _need(attributes.keys().isdisjoint(_CACHE_ATTRIBUTES) != graph.quantized_cache)
    if graph.quantized_cache:
        _need(attributes.keys() >= _CACHE_ATTRIBUTES.keys() and inputs[11] is None)
        for scales in inputs[12:]:
            _given(scales, FLOAT, (1, facts.kv_heads, 1, facts.head_size))
    if graph.tree:
        _need(graph.name(inputs[9]) == "position_ids" if attributes["do_rotary"] else inputs[9] is None)
        _given(inputs[10], dtype, (1, 1, "rows", "total"))
    if "local_window_size" in attributes:
        _need(not graph.tree and attributes["local_window_size"] == facts.sliding_window)
    return [Declared(dtype, (1, "rows", facts.heads * facts.head_size)), graph.cache, graph.cache]


# How keys and values are stored in 8 bits; together or not at all.
_CACHE_ATTRIBUTES: dict[str, Sequence[int | str]] = {
    "k_quant_type": ("PER_CHANNEL",),
    "v_quant_type": ("PER_CHANNEL",),
    "kv_cache_bit_width": (8,),
}

# Operators, their numbers of inputs and outputs, and the values their attributes may have.
RULES: dict[tuple[str, str], Rule] = {
    ("", "Gather"): Rule((2,), (1,), {"axis": (0, 1)}, _gather),
    ("", "Cast"): Rule((1,), (1,), {"to": _FLOATS}, _cast),
    ("", "Abs"): Rule((1,), (1,), {}, _alike),
    ("", "Sigmoid"): Rule((1,), (1,), {}, _alike),
    ("", "Add"): Rule((2,), (1,), {}, _broadcast),
    ("", "Mul"): Rule((2,), (1,), {}, _broadcast),
    ("", "Div"): Rule((2,), (1,), {}, _broadcast),
    ("", "RMSNormalization"): Rule((2,), (1,), {"axis": (-1,), "epsilon": float}, _norm),
    ("", "Split"): Rule((1, 2), (2, 3), {"axis": (-1,), "num_outputs": (2,)}, _split, optional=("num_outputs",)),
    ("", "Reshape"): Rule((2,), (1,), {}, _reshape),
    ("", "Gelu"): Rule((1,), (1,), {"approximate": ("tanh",)}, _alike),
    ("", "Range"): Rule((3,), (1,), {}, _range),
    ("", "Squeeze"): Rule((2,), (1,), {}, _squeeze),
    ("", "Unsqueeze"): Rule((2,), (1,), {}, _unsqueeze),
    ("", "Concat"): Rule((2,), (1,), {"axis": (0,)}, _concatenate),
    ("", "Sub"): Rule((2,), (1,), {}, _subtract),
    ("", "Less"): Rule((2,), (1,), {}, _less),
    ("", "Where"): Rule((3,), (1,), {}, _where),
    ("", "MatMul"): Rule((2,), (1,), {}, _matmul),
    ("", "ReduceMax"): Rule((2,), (1,), {"keepdims": (1,)}, _maximum),
    ("", "Slice"): Rule((4,), (1,), {}, _first_column),
    ("", "Pad"): Rule((4,), (1,), {}, _pad),
    (CONTRIB, "QuantizeLinear"): Rule((3,), (1,), {}, _quantize),
    (CONTRIB, "MatMulIntegerToFloat"): Rule((6,), (1,), {}, _matmul_integers),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): Rule((3,), (4,), {"epsilon": float}, _skip_norm),
    (CONTRIB, "MatMulNBits"): Rule(
        (3, 4),
        (1,),
        {"K": int, "N": int, "bits": (4,), "block_size": _BLOCK_SIZES, "accuracy_level": (4,)},
        _matmul_blocks,
        optional=("accuracy_level",),
    ),
    (CONTRIB, "GatherBlockQuantized"): Rule(
        (3, 4),
        (1,),
        {"bits": (4, 8), "block_size": _BLOCK_SIZES, "gather_axis": (0,), "quantize_axis": (1,)},
        _gather_blocks,
    ),
    (CONTRIB, "GroupQueryAttention"): Rule(
        (9, 11, 14),
        (3,),
        {
            "num_heads": int,
            "kv_num_heads": int,
            "do_rotary": (0, 1),
            "scale": float,
            "local_window_size": int,
            **_CACHE_ATTRIBUTES,
        },
        _attention,
        optional=("scale", "local_window_size", *_CACHE_ATTRIBUTES),
    ),
}
