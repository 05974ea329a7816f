"""Builds the ONNX graph of a decoder by the graph contract (docs/graph-contract.md), one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from edge_spec.export.architecture import Architecture
from edge_spec.export.cache_scales import CacheScales
from edge_spec.export.packing import PackedEmbedding, PackedLayer, PackedMatrix, PackedModel
from edge_spec.export.recipe import Device

_CONTRIB = "com.microsoft"
_OPSETS = {"": 23, _CONTRIB: 1}
_IR_VERSION = 11

# MatMulNBits on CPU: quantize the activations to int8 and accumulate integers.
_INT8_ACCUMULATION = 4
# Where the inputs of GroupQueryAttention for a quantized cache begin.
_SCALE_INPUT = 12
# What the kernels for quantized blocks take, in their order; symmetric blocks have no zero points.
_BLOCK_PARTS = ("weight", "scale", "zero_point")


def build_graph(
    architecture: Architecture,
    model: PackedModel,
    device: Device,
    tree: bool,
    scales: Sequence[CacheScales] | None = None,
) -> ir.Model:
    """Build one graph over a packed model.

    Args:
        architecture: sizes of the model.
        model: the weights; a chain graph and a tree graph can share them.
        device: decides the compute type (float32 or float16) and the kernels' attributes.
        tree: whether attention takes positions and a bias, which a proposal tree needs.
        scales: of each layer's cache, which is int8 with them and in the compute type without.
    """
    graph = _DecoderGraph(architecture, device, tree, model.rotary, scales)
    graph.embed(model.embedding)
    for index, layer in enumerate(model.layers):
        graph.add_layer(index, layer)
    return graph.finish(model.final_norm, model.lm_head)


class _DecoderGraph:
    """One graph under construction: the residual stream, and what has been emitted so far."""

    def __init__(
        self,
        architecture: Architecture,
        device: Device,
        tree: bool,
        rotary: tuple[ir.TensorProtocol, ir.TensorProtocol],
        scales: Sequence[CacheScales] | None,
    ) -> None:
        self._facts = architecture
        self._dtype = ir.DataType.FLOAT if device == "cpu" else ir.DataType.FLOAT16
        self._scales = scales
        self._cache_dtype = self._dtype if scales is None else ir.DataType.INT8
        self._device = device
        self._tree = tree
        self._tape = Tape()
        self._constants: dict[str, ir.Value] = {}
        self._inputs: list[ir.Value] = []
        self._presents: list[ir.Value] = []

        int64, int32 = ir.DataType.INT64, ir.DataType.INT32
        self._ids = self._input("input_ids", int64, [1, "rows"])
        self._positions = self._input("position_ids", int64, [1, "rows"])
        self._seqlens_k = self._input("seqlens_k", int32, [1])
        self._total_length = self._input("total_sequence_length", int32, [])
        self._bias = self._attention_bias() if tree else None
        self._logit_rows = self._input("logit_rows", int64, ["logit_rows"])
        self._cos, self._sin = (self._tape.initializer(table) for table in rotary)

        self._hidden = self._ids
        # What the last sublayer added, not yet summed into the residual stream: the next norm fuses the sum.
        self._pending: ir.Value | None = None

    def embed(self, embedding: PackedEmbedding) -> None:
        """Turn the ids into the residual stream."""
        weight, *scaling = (
            self._tape.initializer(embedding.tensors[part], f"embedding.{part}")
            for part in _BLOCK_PARTS
            if part in embedding.tensors
        )
        if not scaling:
            rows = self._op("Gather", [weight, self._ids], {"axis": 0})
            self._hidden = self._to_compute_type(rows, embedding.format)
            return
        attributes: dict[str, int | float] = {
            "bits": 4 if embedding.format == "int4" else 8,
            "block_size": embedding.block_size,
            "gather_axis": 0,
            "quantize_axis": 1,
        }
        self._hidden = self._op("GatherBlockQuantized", [weight, self._ids, *scaling], attributes, domain=_CONTRIB)

    def add_layer(self, index: int, layer: PackedLayer) -> None:
        """Append decoder layer ``index``."""
        prefix = f"layers.{index}."
        normed = self._norm(layer.input_norm, prefix + "input_norm")
        qkv = self._linear(normed, layer.qkv, layer.qkv_bias, prefix + "qkv")
        attended = self._attention(qkv, index)
        self._pending = self._linear(attended, layer.output, layer.output_bias, prefix + "output")

        normed = self._norm(layer.mlp_norm, prefix + "mlp_norm")
        gate_up = self._linear(normed, layer.gate_up, layer.gate_up_bias, prefix + "gate_up")
        gate, up = self._tape.op_multi_out("Split", [gate_up], {"axis": -1, "num_outputs": 2}, num_outputs=2)
        activated = self._op("Mul", [self._op("Mul", [gate, self._op("Sigmoid", [gate])]), up])
        self._pending = self._linear(activated, layer.down, layer.down_bias, prefix + "down")

    def finish(self, final_norm: ir.TensorProtocol, lm_head: PackedMatrix) -> ir.Model:
        """Append the final norm and lm_head on the wanted rows, and return the model."""
        assert self._pending is not None  # a decoder has layers
        summed = self._op("Add", [self._hidden, self._pending])
        self._hidden, self._pending = self._op("Gather", [summed, self._logit_rows], {"axis": 1}), None
        normed = self._norm(final_norm, "final_norm")
        logits = self._linear(normed, lm_head, None, "lm_head", may_be_empty=True)
        if self._dtype != ir.DataType.FLOAT:
            logits = self._op("Cast", [logits], {"to": ir.DataType.FLOAT})
        _describe(logits, "logits", ir.DataType.FLOAT, [1, "logit_rows", lm_head.outputs])
        graph = ir.Graph(
            self._inputs,
            [logits, *self._presents],
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports=_OPSETS,
            name="decoder",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edge-spec")

    def _norm(self, gain: ir.TensorProtocol, name: str) -> ir.Value:
        """RMS norm of the residual stream, after summing into it what is pending."""
        weight = self._tape.initializer(gain)
        epsilon = {"epsilon": self._facts.norm_epsilon}
        if self._pending is None:
            return self._op("RMSNormalization", [self._hidden, weight], {**epsilon, "axis": -1}, name=name)
        normed, _, _, self._hidden = self._tape.op_multi_out(
            "SkipSimplifiedLayerNormalization",
            [self._hidden, self._pending, weight],
            epsilon,
            num_outputs=4,
            domain=_CONTRIB,
            name=name,
        )
        self._pending = None
        return normed

    def _attention_bias(self) -> ir.Value:
        """The bias of every layer's attention [1, 1, rows, total]: the call's own, behind zeros for the cache."""
        own = self._input("tree_bias", self._dtype, [1, 1, "rows", "rows"])
        padding = self._input("tree_bias_padding", ir.DataType.INT64, [2])
        columns = self._constant("bias_columns", np.array([3], np.int64))
        return self._op("Pad", [own, padding, None, columns])

    def _attention(self, qkv: ir.Value, index: int) -> ir.Value:
        facts = self._facts
        shape: list[int | str] = [1, facts.kv_heads, "capacity", facts.head_size]
        past = [self._input(f"past_key_values.{index}.{part}", self._cache_dtype, shape) for part in ("key", "value")]
        inputs = [qkv, None, None, *past, self._seqlens_k, self._total_length, self._cos, self._sin]
        inputs += [self._positions, self._bias] if self._tree else []
        attributes: dict[str, int | str] = {"num_heads": facts.heads, "kv_num_heads": facts.kv_heads, "do_rotary": 1}
        if self._scales is not None:
            scales = self._scales[index]
            inputs += [None] * (_SCALE_INPUT - len(inputs))
            inputs += [self._scale(index, "key", scales.key), self._scale(index, "value", scales.value)]
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        attended, *present = self._tape.op_multi_out(
            "GroupQueryAttention",
            inputs,
            attributes,
            num_outputs=3,
            domain=_CONTRIB,
            name=f"layers.{index}.attention",
        )
        for value, part in zip(present, ("key", "value"), strict=True):
            self._presents.append(_describe(value, f"present.{index}.{part}", self._cache_dtype, shape))
        return attended

    def _scale(self, index: int, part: str, scale: np.ndarray) -> ir.Value:
        shaped = scale.reshape(1, self._facts.kv_heads, 1, self._facts.head_size)
        return self._tape.initializer(ir.tensor(shaped, name=f"layers.{index}.{part}_scale"))

    def _linear(
        self,
        x: ir.Value,
        matrix: PackedMatrix,
        bias: ir.TensorProtocol | None,
        name: str,
        may_be_empty: bool = False,
    ) -> ir.Value:
        """Multiply rows by a matrix; ``may_be_empty`` says that a call may bring no rows at all."""
        if matrix.format == "w8a8":
            product = self._w8a8(x, matrix, name, may_be_empty)
        elif matrix.format == "int4":
            product = self._int4(x, matrix, name)
        else:
            weight = self._to_compute_type(self._tape.initializer(matrix.tensors["weight"]), matrix.format)
            product = self._op("MatMul", [x, weight], name=name)
        if bias is None:
            return product
        return self._op("Add", [product, self._tape.initializer(bias)], name=name + ".bias")

    def _int4(self, x: ir.Value, matrix: PackedMatrix, name: str) -> ir.Value:
        attributes = {"K": matrix.inputs, "N": matrix.outputs, "bits": 4, "block_size": matrix.block_size}
        if self._device == "cpu":
            attributes["accuracy_level"] = _INT8_ACCUMULATION
        stored = [self._tape.initializer(matrix.tensors[part]) for part in _BLOCK_PARTS if part in matrix.tensors]
        return self._op("MatMulNBits", [x, *stored], attributes, domain=_CONTRIB, name=name)

    def _w8a8(self, x: ir.Value, matrix: PackedMatrix, name: str, may_be_empty: bool) -> ir.Value:
        integers, row_scale = self._quantize_rows(x, may_be_empty)
        weight, scale = (self._tape.initializer(matrix.tensors[part]) for part in ("weight", "scale"))
        signed = weight.dtype == ir.DataType.INT8
        weight_zero = self._constant("int8_zero", np.int8(0)) if signed else self._constant("middle", np.uint8(128))
        one, middle = self._constant("one", np.float32(1)), self._constant("middle", np.uint8(128))
        product = self._op(
            "MatMulIntegerToFloat", [integers, weight, one, scale, middle, weight_zero], domain=_CONTRIB, name=name
        )
        return self._op("Mul", [product, row_scale], name=name + ".scale")

    def _quantize_rows(self, x: ir.Value, may_be_empty: bool) -> tuple[ir.Value, ir.Value]:
        """Quantize each row on its own to uint8 around 128, so that no row's result depends on its companions.

        Returns the integers and the scale of each row, max|x| / 127. A row of zeros gets arbitrary integers, and a
        scale of zero that makes their products zero again.
        """
        axis = self._constant("last_axis", np.array([-1], np.int64))
        extreme = self._op("ReduceMax", [self._op("Abs", [x]), axis], {"keepdims": 1})
        if may_be_empty:
            # Where there are no rows at all, ONNX Runtime 1.23 returns the maximum in the shape of x.
            start = self._constant("column_start", np.array([0], np.int64))
            stop = self._constant("column_stop", np.array([1], np.int64))
            extreme = self._op("Slice", [extreme, start, stop, axis])
        scale = self._op("Mul", [extreme, self._constant("step", np.float32(1 / 127))])
        one, middle = self._constant("one", np.float32(1)), self._constant("middle", np.uint8(128))
        # The contributed operator, since the standard one of this opset is missing in ONNX Runtime 1.23.
        integers = self._op("QuantizeLinear", [self._op("Div", [x, scale]), one, middle], domain=_CONTRIB)
        return integers, scale

    def _to_compute_type(self, value: ir.Value, storage: str) -> ir.Value:
        stored = ir.DataType.FLOAT if storage == "fp32" else ir.DataType.FLOAT16
        return value if stored == self._dtype else self._op("Cast", [value], {"to": self._dtype})

    def _input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = _describe(ir.Value(), name, dtype, shape)
        self._inputs.append(value)
        return value

    def _constant(self, name: str, value: np.generic | np.ndarray) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.tensor(np.asarray(value), name=name))
        return self._constants[name]

    def _op(
        self,
        kind: str,
        inputs: list[ir.Value | None],
        attributes: Mapping[str, int | float] | None = None,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        return self._tape.op(kind, inputs, attributes, domain=domain, name=name)


def _describe(value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
