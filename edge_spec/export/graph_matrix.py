"""The nodes that multiply by a matrix or look up a row of the embedding, in each storage format."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_tape import CONTRIB, GraphTape
from edge_spec.export.mixing import mixer
from edge_spec.export.packing import PackedEmbedding, PackedMatrix

# MatMulNBits on CPU: quantize the activations to int8 and accumulate integers.
_INT8_ACCUMULATION = 4
# What the kernels for quantized blocks take, in their order; symmetric blocks have no zero points.
_BLOCK_PARTS = ("weight", "scale", "zero_point")


def look_up(tape: GraphTape, ids: ir.Value, embedding: PackedEmbedding) -> ir.Value:
    """Return the rows of the embedding that the ids name, compute type [1, rows, hidden]."""
    weight, *scaling = (
        tape.weight(embedding.tensors[part], f"embedding.{part}") for part in _BLOCK_PARTS if part in embedding.tensors
    )
    if not scaling:
        return _to_compute_type(tape, tape.op("Gather", [weight, ids], {"axis": 0}), embedding.format)
    attributes = {
        "bits": 4 if embedding.format == "int4" else 8,
        "block_size": embedding.block_size,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    return tape.op("GatherBlockQuantized", [weight, ids, *scaling], attributes, domain=CONTRIB)


def multiply(
    tape: GraphTape,
    x: ir.Value,
    matrix: PackedMatrix,
    bias: ir.TensorProtocol | None,
    name: str,
    may_be_empty: bool = False,
) -> ir.Value:
    """Multiply rows by a matrix; ``may_be_empty`` says that a call may bring no rows at all."""
    if matrix.format == "w8a8":
        product = _w8a8(tape, x, matrix, name, may_be_empty)
    elif matrix.format == "int4":
        product = _int4(tape, x, matrix, name)
    else:
        weight = _to_compute_type(tape, tape.weight(matrix.tensors["weight"]), matrix.format)
        product = tape.op("MatMul", [x, weight], name=name)
    if bias is None:
        return product
    return tape.op("Add", [product, tape.weight(bias)], name=name + ".bias")


def _int4(tape: GraphTape, x: ir.Value, matrix: PackedMatrix, name: str) -> ir.Value:
    attributes = {"K": matrix.inputs, "N": matrix.outputs, "bits": 4, "block_size": matrix.block_size}
    if tape.device == "cpu":
        attributes["accuracy_level"] = _INT8_ACCUMULATION
    stored = [tape.weight(matrix.tensors[part]) for part in _BLOCK_PARTS if part in matrix.tensors]
    return tape.op("MatMulNBits", [x, *stored], attributes, domain=CONTRIB, name=name)


def _w8a8(tape: GraphTape, x: ir.Value, matrix: PackedMatrix, name: str, may_be_empty: bool) -> ir.Value:
    if matrix.run > 1:
        x = _mixed(tape, x, matrix)
    integers, row_scale = _quantize_rows(tape, x, may_be_empty)
    weight, scale = (tape.weight(matrix.tensors[part]) for part in ("weight", "scale"))
    signed = weight.dtype == ir.DataType.INT8
    weight_zero = tape.constant("int8_zero", np.int8(0)) if signed else tape.constant("middle", np.uint8(128))
    one, middle = tape.constant("one", np.float32(1)), tape.constant("middle", np.uint8(128))
    product = tape.op(
        "MatMulIntegerToFloat", [integers, weight, one, scale, middle, weight_zero], domain=CONTRIB, name=name
    )
    return tape.op("Mul", [product, row_scale], name=name + ".scale")


def _mixed(tape: GraphTape, x: ir.Value, matrix: PackedMatrix) -> ir.Value:
    """Mix each run of neighbours, as the weights are."""
    run = matrix.run
    apart = tape.constant(f"runs_apart.{matrix.inputs}", np.array([0, 0, matrix.inputs // run, run], np.int64))
    together = tape.constant(f"runs_together.{matrix.inputs}", np.array([0, 0, matrix.inputs], np.int64))
    mixed = tape.op("MatMul", [tape.op("Reshape", [x, apart]), tape.constant(f"mixer.{run}", mixer(run))])
    return tape.op("Reshape", [mixed, together])


def _quantize_rows(tape: GraphTape, x: ir.Value, may_be_empty: bool) -> tuple[ir.Value, ir.Value]:
    """Quantize each row on its own to uint8 around 128, so that no row's result depends on its companions.

    Returns the integers and the scale of each row, max|x| / 127. A row of zeros gets arbitrary integers, and a scale
    of zero that makes their products zero again.
    """
    axis = tape.constant("last_axis", np.array([-1], np.int64))
    extreme = tape.op("ReduceMax", [tape.op("Abs", [x]), axis], {"keepdims": 1})
    if may_be_empty:
        # Where there are no rows at all, ONNX Runtime 1.23 returns the maximum in the shape of x.
        start = tape.constant("column_start", np.array([0], np.int64))
        stop = tape.constant("column_stop", np.array([1], np.int64))
        extreme = tape.op("Slice", [extreme, start, stop, axis])
    scale = tape.op("Mul", [extreme, tape.constant("step", np.float32(1 / 127))])
    one, middle = tape.constant("one", np.float32(1)), tape.constant("middle", np.uint8(128))
    # The contributed operator, since the standard one of this opset is missing in ONNX Runtime 1.23.
    integers = tape.op("QuantizeLinear", [tape.op("Div", [x, scale]), one, middle], domain=CONTRIB)
    return integers, scale


def _to_compute_type(tape: GraphTape, value: ir.Value, storage: str) -> ir.Value:
    stored = ir.DataType.FLOAT if storage == "fp32" else ir.DataType.FLOAT16
    return value if stored == tape.dtype else tape.op("Cast", [value], {"to": tape.dtype})
