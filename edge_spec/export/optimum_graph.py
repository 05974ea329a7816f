"""Writes a graph of optimum-onnx anew, by the contract for such graphs (docs/graph-contract.md).

optimum-onnx exports a decoder that is given its past and returns past and new rows in one piece, which has another size
in every call. What each layer does with it is the same in all of them: ``Concat(past, new)``, and attention over the
result. So the past can be the beginning of a buffer of any size, cut out by the graph, and only the new rows need to
leave it: then nothing but those is ever copied outside, and taking tokens back is a smaller number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.tape import Tape

from edge_spec.export.optimum_trace import TracedGraph, constant
from edge_spec.export.quantize import quantize_blocks_with_zero_points
from edge_spec.export.recipe import Recipe
from edge_spec.export.weights import WeightFile

_CONTRIB = "com.microsoft"
_IR_VERSION = 11
# As the graphs of the exporter itself have it: activations are rounded to 8 bits, and integers are accumulated.
_INT8_ACCUMULATION = 4

# Tensors of so many bytes or more lie in the weight file, smaller ones in the graph.
_LARGE = 1024

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_TYPES = (_FLOAT, _INT64, ir.DataType.INT32, ir.DataType.BOOL)
_PLAIN = (ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.INTS)

Dimensions = Sequence[int | str]


@dataclass(frozen=True)
class GraphSizes:
    """What a graph itself tells of its model.

    Attributes:
        hidden_size: columns of the embedding.
        widest: columns of the widest matrix, lm_head aside.
    """

    layers: int
    kv_heads: int
    head_size: int
    hidden_size: int
    widest: int
    logits_size: int


def rewrite_graph(
    exported: ir.Model, weights: WeightFile, recipe: Recipe, where: str, progress: Callable[[int, int], None]
) -> tuple[ir.Model, GraphSizes]:
    """Write a graph anew, with its weights in a file, stored as the recipe says.

    Args:
        exported: by optimum-onnx, with past.
        weights: the file beside the new graph.
        recipe: matrices in ``fp32`` or ``int4``; embeddings stay in float32.
        where: names the model in errors.
        progress: told how many of how many nodes are done.

    Returns:
        The new graph, and the sizes it has.

    Raises:
        UnsupportedError: the graph uses its past in a way that is not known, or has unknown parts.
    """
    old = TracedGraph(exported.graph, where)
    new = _NewGraph(old, weights, recipe)
    nodes = list(old.needed_nodes())
    for index, node in enumerate(nodes):
        progress(index, len(nodes))
        new.copy(node)
    progress(len(nodes), len(nodes))
    return new.finish(), new.sizes()


class _NewGraph:
    """The new graph under construction, and what stands in it for each value of the old one."""

    def __init__(self, old: TracedGraph, weights: WeightFile, recipe: Recipe) -> None:
        self._old = old
        self._weights = weights
        self._recipe = recipe
        self._tape = Tape()
        self._inputs: list[ir.Value] = []
        self._new: dict[ir.Value, ir.Value] = {}
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        self._stored: dict[ir.TensorProtocol, ir.Value] = {}
        self._computed: dict[object, Sequence[ir.Value]] = {}
        self._matrix_columns = [0]  # of all but lm_head
        self._embedding = (0, 0)  # rows and columns of the longest table
        self._opsets = {"": old.opset}

        ids = self._input("input_ids", _INT64, [1, "rows"])
        past_length = self._input("past_length", _INT64, [1])
        self._logit_rows = self._input("logit_rows", _INT64, ["logit_rows"])
        self._new[old.inputs["input_ids"]] = ids
        total = self._op("Add", [past_length, self._op("Slice", [self._op("Shape", [ids]), *self._numbers(1, 2)])])
        if (mask := old.inputs.get("attention_mask")) is not None:  # nothing is hidden
            size = self._op("Concat", [*self._numbers(1), total], {"axis": 0})
            self._new[mask] = self._op("Expand", [*self._numbers(1), size])
        if (position_ids := old.inputs.get("position_ids")) is not None:
            first, behind_last = (self._op("Squeeze", [value, *self._numbers(0)]) for value in (past_length, total))
            positions = self._op("Range", [first, behind_last, self._constant(np.array(1, np.int64))])
            self._new[position_ids] = self._op("Unsqueeze", [positions, *self._numbers(0)])
        for slot in old.slots:
            name = f"past_key_values.{slot}"
            buffer = self._input(name, _FLOAT, [1, old.kv_heads, "capacity", old.head_size])
            start, axis = self._numbers(0, 2)
            self._new[old.inputs[name]] = self._op("Slice", [buffer, start, past_length, axis])

    def copy(self, node: ir.Node) -> None:
        """Write one node of the old graph, whose inputs have been written."""
        if node.domain not in ("", "ai.onnx"):
            raise self._old.unsupported(f"it uses the operator {node.domain}::{node.op_type}")
        if node.op_type == "Constant":
            return  # written where it is used
        if node.op_type == "Identity":
            outputs: Sequence[ir.Value] = [self._value(node.inputs[0])]
        elif node.op_type == "ConstantOfShape":
            outputs = [self._filled(node)]
        elif node.op_type == "MatMul" and (weight := constant(node.inputs[1])) is not None and len(weight.shape) == 2:
            outputs = [self._product(node, weight)]
        elif node.op_type == "Gemm":
            outputs = [self._affine(node)]
        else:
            outputs = self._as_it_is(node)
        self._new.update(zip(node.outputs, outputs, strict=True))

    def finish(self) -> ir.Model:
        """Name the outputs and return the model."""
        old = self._old
        logits = self._value(old.outputs["logits"])
        if old.head is None:
            logits = self._op("Gather", [logits, self._logit_rows], {"axis": 1})
        outputs = [_described(logits, "logits", _FLOAT, [1, "logit_rows", old.logits_size])]
        for slot, rows in old.new_rows.items():
            new = self._value(rows)
            if new.producer() is None or new in outputs:
                raise old.unsupported("it computes no keys or values of its own in some layer")
            outputs.append(_described(new, f"new.{slot}", _FLOAT, [1, old.kv_heads, "rows", old.head_size]))
        nodes, initializers = self._tape.nodes, self._tape.initializers
        graph = ir.Graph(
            self._inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=self._opsets, name="decoder"
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edge-spec")

    def sizes(self) -> GraphSizes:
        """What the graph has told by now."""
        old, layers = self._old, len(self._old.slots) // 2
        widest = max(self._matrix_columns)
        hidden = self._embedding[1] or widest
        return GraphSizes(layers, old.kv_heads, old.head_size, hidden, widest, old.logits_size)

    def _as_it_is(self, node: ir.Node) -> Sequence[ir.Value]:
        if any(attribute.type not in _PLAIN for attribute in node.attributes.values()):
            raise self._old.unsupported(f"its operator {node.op_type} has an attribute that is no number")
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = [None if value is None else self._value(value) for value in node.inputs]
        if node.op_type == "Gather" and attributes.get("axis", 0) == 0:
            table = constant(node.inputs[0])
            if table is not None and table.dtype == _FLOAT and len(table.shape) == 2:
                rows, columns = table.shape.numpy()
                self._embedding = max(self._embedding, (rows, columns))
                inputs[0] = self._large(table, "embedding")
        return self._emit(node.op_type, inputs, attributes, outputs=len(node.outputs))

    def _filled(self, node: ir.Node) -> ir.Value:
        """A tensor of one value everywhere, which ONNX gives as an attribute."""
        attribute, shape = node.attributes.get("value"), constant(node.inputs[0])
        value = np.zeros((), np.float32) if attribute is None else attribute.as_tensor().numpy().reshape(())
        if shape is not None and not shape.size:  # an empty shape is that of a single number
            return self._constant(value)
        return self._op("Expand", [self._constant(value), self._value(node.inputs[0])])

    def _affine(self, node: ir.Node) -> ir.Value:
        """A Gemm, which in decoders is a product with a matrix and a bias behind it."""
        factors = {name: node.attributes[name].value for name in ("alpha", "beta", "transA") if name in node.attributes}
        weight = constant(node.inputs[1])
        if weight is None or any(value != (0 if name == "transA" else 1) for name, value in factors.items()):
            raise self._old.unsupported("it has a Gemm that is no product with a constant matrix")
        product = self._product(node, weight, transposed="transB" in node.attributes)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return product if bias is None else self._op("Add", [product, self._value(bias)])

    def _product(self, node: ir.Node, weight: ir.TensorProtocol, transposed: bool = False) -> ir.Value:
        x = self._value(node.inputs[0])
        stored_matrix: npt.NDArray[Any] = weight.numpy()
        matrix = stored_matrix.T if transposed else stored_matrix  # [inputs, outputs]
        if node is self._old.head:
            x = self._op("Gather", [x, self._logit_rows], {"axis": 1})
            storage = self._recipe.lm_head
        else:
            self._matrix_columns.append(matrix.shape[1])
            storage = self._recipe.attention
        name = f"matrices.{len(self._matrix_columns)}" if node is not self._old.head else "lm_head"
        if storage != "int4":
            return self._op("MatMul", [x, self._store(name, matrix)])
        parts: tuple[npt.NDArray[Any], ...] = quantize_blocks_with_zero_points(
            np.ascontiguousarray(matrix.T), self._recipe.block_size
        )
        stored = [
            self._store(f"{name}.{part}", array)
            for part, array in zip(("weight", "scale", "zero_point"), parts, strict=True)
        ]
        attributes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": 4, "block_size": self._recipe.block_size}
        self._opsets[_CONTRIB] = 1
        attributes["accuracy_level"] = _INT8_ACCUMULATION
        return self._emit("MatMulNBits", [x, *stored], attributes, domain=_CONTRIB)[0]

    def _value(self, value: ir.Value | None) -> ir.Value:
        """What stands for a value of the old graph."""
        assert value is not None  # the inputs that are asked for are not optional
        tensor = constant(value)
        if tensor is not None:
            return self._large(tensor, "constants") if tensor.nbytes >= _LARGE else self._constant(tensor.numpy())
        return self._new[value]

    def _large(self, tensor: ir.TensorProtocol, kind: str) -> ir.Value:
        if tensor not in self._stored:
            self._stored[tensor] = self._store(f"{kind}.{len(self._stored)}", tensor.numpy())
        return self._stored[tensor]

    def _store(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        self._require_type(ir.DataType.from_numpy(array.dtype), weight=True)
        if array.nbytes < _LARGE:
            return self._tape.initializer(ir.tensor(np.ascontiguousarray(array), name=name))
        return self._tape.initializer(self._weights.append(name, array))

    def _constant(self, array: npt.NDArray[Any]) -> ir.Value:
        dtype = ir.DataType.from_numpy(array.dtype)
        self._require_type(dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array, name=f"constant.{len(self._constants)}")
            self._constants[key] = self._tape.initializer(tensor)
        return self._constants[key]

    def _require_type(self, dtype: ir.DataType, weight: bool = False) -> None:
        if dtype not in _TYPES and not (weight and dtype == ir.DataType.UINT8):
            raise self._old.unsupported(f"it holds numbers of type {dtype.name}")

    def _numbers(self, *values: int) -> Iterator[ir.Value]:
        """Constants of one integer each, int64 [1]."""
        return (self._constant(np.array([value], np.int64)) for value in values)

    def _input(self, name: str, dtype: ir.DataType, shape: Dimensions) -> ir.Value:
        value = _described(ir.Value(), name, dtype, shape)
        self._inputs.append(value)
        return value

    def _op(self, kind: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any] | None = None) -> ir.Value:
        return self._emit(kind, inputs, attributes or {})[0]

    def _emit(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        domain: str = "",
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        """Write a node, unless the same has been computed before."""
        key = (domain, kind, *(id(value) for value in inputs), *sorted((n, str(v)) for n, v in attributes.items()))
        if key not in self._computed:
            self._computed[key] = self._tape.op_multi_out(kind, inputs, attributes, num_outputs=outputs, domain=domain)
        return self._computed[key]


def _described(value: ir.Value, name: str, dtype: ir.DataType, shape: Dimensions) -> ir.Value:
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
