"""Rules of the nodes that multiply by a matrix or look up a row, in each storage format."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import (
    CONTRIB,
    FLOATS,
    Attributes,
    Inputs,
    Rule,
    Surroundings,
    constants,
    given,
    last_size,
    need,
)
from edge_spec.onnx_file import FLOAT, INT8, INT64, UINT8, Declared

_BLOCK_SIZES = (16, 32, 64, 128, 256)


def _gather_blocks(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    rows, hidden = graph.facts.readable_ids, graph.facts.hidden_size
    bits, block = int(attributes["bits"]), int(attributes["block_size"])
    need(graph.names_rows(inputs[1]))
    blocks = -(-hidden // block)
    given(inputs[0], UINT8, (rows, hidden * bits // 8))
    scale = given(inputs[2], FLOATS, (rows, blocks))
    if len(inputs) == 4:
        given(inputs[3], UINT8, (rows, -(-blocks * bits // 8)))
    return [Declared(scale.dtype, (*given(inputs[1], INT64).shape, hidden))]


def _matmul(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    weight = given(inputs[1], x.dtype)
    if len(x.shape) == 2:  # the pieces of a row are mixed, from the left
        need(len(weight.shape) == 4 and x.shape == (weight.shape[2], weight.shape[2]))
        return [weight]
    need(len(x.shape) in (3, 4) and len(weight.shape) == 2 and weight.shape[0] == last_size(x))
    need(len(x.shape) == 3 or last_size(weight) == last_size(x))  # runs of inputs are mixed, not made longer
    return [Declared(x.dtype, (*x.shape[:-1], last_size(weight)))]


def _matmul_blocks(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    outputs, block = int(attributes["N"]), int(attributes["block_size"])
    blocks = -(-last_size(x) // block)
    need(last_size(x) == attributes["K"] and len(x.shape) == 3)
    given(inputs[1], UINT8, (outputs, blocks, block // 2))
    given(inputs[2], x.dtype, (outputs, blocks))
    if len(inputs) == 4:
        given(inputs[3], UINT8, (outputs, -(-blocks // 2)))
    return [Declared(x.dtype, (*x.shape[:-1], outputs))]


def _matmul_integers(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x, weight = given(inputs[0], UINT8), given(inputs[1], (UINT8, INT8))
    need(len(x.shape) == 3 and len(weight.shape) == 2 and weight.shape[0] == last_size(x))
    given(inputs[2], FLOAT, ())
    given(inputs[3], FLOAT, (last_size(weight),))
    given(inputs[4], UINT8, ())
    given(inputs[5], weight.dtype, ())
    return [Declared(FLOAT, (*x.shape[:-1], last_size(weight)))]


def _quantize(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOAT)
    given(inputs[1], FLOAT, ())
    given(inputs[2], UINT8, ())
    return [Declared(UINT8, x.shape)]


def _maximum(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOAT)
    need(len(x.shape) == 3)
    constants(graph, inputs[1], -1)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def first_column(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    """Of the rule of Slice: the scales of quantized rows."""
    x = given(inputs[0], FLOAT)
    for value, number in zip(inputs[1:], (0, 1, -1), strict=True):
        constants(graph, value, number)
    need(len(x.shape) == 3)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


MATRIX_RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): Rule((2,), (1,), {}, _matmul),
    ("", "ReduceMax"): Rule((2,), (1,), {"keepdims": (1,)}, _maximum),
    (CONTRIB, "QuantizeLinear"): Rule((3,), (1,), {}, _quantize),
    (CONTRIB, "MatMulIntegerToFloat"): Rule((6,), (1,), {}, _matmul_integers),
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
}
