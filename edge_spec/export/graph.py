"""Builds the ONNX graph of a decoder by the graph contract (docs/graph-contract.md), one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from edge_spec.export.architecture import Architecture, LayerAttention
from edge_spec.export.cache_scales import CacheScales
from edge_spec.export.packing import PackedEmbedding, PackedLayer, PackedMatrix, PackedModel
from edge_spec.export.recipe import Device
from edge_spec.export.rope import Rope
from edge_spec.export.window_bias import window_bias

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
        rotary: Mapping[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]],
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
        # What attention adds to its scores, by the window of its layer.
        self._bias = self._attention_bias() if tree else {}
        self._logit_rows = self._input("logit_rows", int64, ["logit_rows"])
        self._rotary = {rope: [self._tape.initializer(table) for table in tables] for rope, tables in rotary.items()}

        self._hidden = self._ids
        # What the last sublayer added, not yet summed into the residual stream: the next norm fuses the sum.
        self._pending: ir.Value | None = None

    def embed(self, embedding: PackedEmbedding) -> None:
        """Turn the ids into the residual stream."""
        self._hidden = self._scaled(self._look_up(embedding), self._facts.embedding_scale, "embedding_scale")

    def add_layer(self, index: int, layer: PackedLayer) -> None:
        """Append decoder layer ``index``."""
        prefix = f"layers.{index}."
        normed = self._norm(layer.input_norm, prefix + "input_norm")
        qkv = self._linear(normed, layer.qkv, layer.qkv_bias, prefix + "qkv")
        attended = self._attention(self._queries_keys_values(qkv, layer, prefix), index)
        update = self._linear(attended, layer.output, layer.output_bias, prefix + "output")
        self._pending = self._post_norm(update, layer.post_attention_norm, prefix + "post_attention_norm")

        normed = self._norm(layer.mlp_norm, prefix + "mlp_norm")
        gate_up = self._linear(normed, layer.gate_up, layer.gate_up_bias, prefix + "gate_up")
        gate, up = self._tape.op_multi_out("Split", [gate_up], {"axis": -1, "num_outputs": 2}, num_outputs=2)
        activated = self._op("Mul", [self._activation(gate), up])
        update = self._linear(activated, layer.down, layer.down_bias, prefix + "down")
        self._pending = self._post_norm(update, layer.post_mlp_norm, prefix + "post_mlp_norm")

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

    def _look_up(self, embedding: PackedEmbedding) -> ir.Value:
        """The rows of the embedding that the ids name."""
        weight, *scaling = (
            self._tape.initializer(embedding.tensors[part], f"embedding.{part}")
            for part in _BLOCK_PARTS
            if part in embedding.tensors
        )
        if not scaling:
            rows = self._op("Gather", [weight, self._ids], {"axis": 0})
            return self._to_compute_type(rows, embedding.format)
        attributes: dict[str, int | float] = {
            "bits": 4 if embedding.format == "int4" else 8,
            "block_size": embedding.block_size,
            "gather_axis": 0,
            "quantize_axis": 1,
        }
        return self._op("GatherBlockQuantized", [weight, self._ids, *scaling], attributes, domain=_CONTRIB)

    def _scaled(self, x: ir.Value, factor: float, name: str) -> ir.Value:
        return x if factor == 1.0 else self._op("Mul", [x, self._constant(name, self._number(factor))])

    def _activation(self, gate: ir.Value) -> ir.Value:
        if self._facts.activation == "gelu_tanh":
            return self._op("Gelu", [gate], {"approximate": "tanh"})
        return self._op("Mul", [gate, self._op("Sigmoid", [gate])])

    def _norm(self, gain: ir.TensorProtocol, name: str) -> ir.Value:
        """RMS norm of the residual stream, after summing into it what is pending."""
        if self._pending is None:
            return self._rms_norm(self._hidden, gain, name)
        normed, _, _, self._hidden = self._tape.op_multi_out(
            "SkipSimplifiedLayerNormalization",
            [self._hidden, self._pending, self._tape.initializer(gain)],
            {"epsilon": self._facts.norm_epsilon},
            num_outputs=4,
            domain=_CONTRIB,
            name=name,
        )
        self._pending = None
        return normed

    def _post_norm(self, update: ir.Value, gain: ir.TensorProtocol | None, name: str) -> ir.Value:
        """What a sublayer adds to the residual stream, normed where the family does that."""
        return update if gain is None else self._rms_norm(update, gain, name)

    def _rms_norm(self, x: ir.Value, gain: ir.TensorProtocol, name: str) -> ir.Value:
        attributes = {"epsilon": self._facts.norm_epsilon, "axis": -1}
        return self._op("RMSNormalization", [x, self._tape.initializer(gain)], attributes, name=name)

    def _attention_bias(self) -> dict[int | None, ir.Value]:
        """The bias of attention [1, 1, rows, total] by window: the call's own, behind zeros for the cache."""
        own = self._input("tree_bias", self._dtype, [1, 1, "rows", "rows"])
        padding = self._input("tree_bias_padding", ir.DataType.INT64, [2])
        columns = self._constant("bias_columns", np.array([3], np.int64))
        bias = self._op("Pad", [own, padding, None, columns])
        window = self._facts.window
        if window is None:
            return {None: bias}
        return {
            None: bias,
            window: window_bias(
                self._tape, bias, self._positions, padding, window, self._number(-np.inf), self._constant
            ),
        }

    def _queries_keys_values(self, qkv: ir.Value, layer: PackedLayer, prefix: str) -> list[ir.Value | None]:
        """What attention reads: the three in one value, or each its own where queries and keys are normed by heads."""
        if layer.q_norm is None or layer.k_norm is None:
            return [qkv, None, None]
        facts = self._facts
        query, key, value = self._tape.op_multi_out(
            "Split",
            [
                qkv,
                self._constant("qkv_sizes", np.array([facts.heads, *[facts.kv_heads] * 2], np.int64) * facts.head_size),
            ],
            {"axis": -1},
            num_outputs=3,
        )
        return [
            self._head_norm(query, layer.q_norm, facts.heads, prefix + "q_norm"),
            self._head_norm(key, layer.k_norm, facts.kv_heads, prefix + "k_norm"),
            value,
        ]

    def _head_norm(self, x: ir.Value, gain: ir.TensorProtocol, heads: int, name: str) -> ir.Value:
        size = self._facts.head_size
        apart = self._constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        together = self._constant(f"row_{heads}", np.array([0, 0, heads * size], np.int64))
        normed = self._rms_norm(self._op("Reshape", [x, apart]), gain, name)
        return self._op("Reshape", [normed, together])

    def _attention(self, queries_keys_values: list[ir.Value | None], index: int) -> ir.Value:
        facts, layer = self._facts, self._facts.attention[index]
        shape: list[int | str] = [1, facts.kv_heads, "capacity", facts.head_size]
        past = [self._input(f"past_key_values.{index}.{part}", self._cache_dtype, shape) for part in ("key", "value")]
        inputs = [*queries_keys_values, *past, self._seqlens_k, self._total_length]
        inputs += [None, None] if layer.rope is None else self._rotary[layer.rope]
        if self._tree:
            inputs += [None if layer.rope is None else self._positions, self._bias[layer.window]]
        attributes = self._attention_attributes(layer)
        if self._scales is not None:
            scales = self._scales[index]
            inputs += [None] * (_SCALE_INPUT - len(inputs))
            inputs += [self._scale(index, "key", scales.key), self._scale(index, "value", scales.value)]
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

    def _attention_attributes(self, layer: LayerAttention) -> dict[str, int | float | str]:
        facts = self._facts
        attributes: dict[str, int | float | str] = {
            "num_heads": facts.heads,
            "kv_num_heads": facts.kv_heads,
            "do_rotary": int(layer.rope is not None),
        }
        if facts.attention_scale is not None:
            attributes["scale"] = facts.attention_scale
        if layer.window is not None and not self._tree:
            # Slots, which are positions in a chain. In a tree they are not, so there the bias tells.
            attributes["local_window_size"] = layer.window
        if self._scales is not None:
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        return attributes

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

    def _number(self, value: float) -> np.generic:
        """A scalar of the compute type."""
        return np.float32(value) if self._dtype == ir.DataType.FLOAT else np.float16(value)

    def _constant(self, name: str, value: np.generic | np.ndarray) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.tensor(np.asarray(value), name=name))
        return self._constants[name]

    def _op(
        self,
        kind: str,
        inputs: list[ir.Value | None],
        attributes: Mapping[str, int | float | str] | None = None,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        return self._tape.op(kind, inputs, attributes, domain=domain, name=name)


def _describe(value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
