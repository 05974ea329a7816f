"""The nodes of attention: from the projected queries, keys and values of a layer to what its heads have read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from edge_spec.export.architecture import Architecture, LayerAttention
from edge_spec.export.cache_scales import CacheScales
from edge_spec.export.graph_tape import CONTRIB, GraphTape, describe
from edge_spec.export.packing import PackedLayer
from edge_spec.export.rope import Rope
from edge_spec.export.window_bias import window_bias

# Where the inputs of GroupQueryAttention for a quantized cache begin.
_SCALE_INPUT = 12


class GraphAttention:
    """Attention of all layers of one graph, which share the lengths, the rotary tables and the bias.

    Attributes:
        presents: the updated caches, one key and one value for each layer so far, of each step.
    """

    def __init__(
        self,
        tape: GraphTape,
        architecture: Architecture,
        positions: ir.Value | None,
        tree: bool,
        rotary: Mapping[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]],
        scales: Sequence[CacheScales] | None,
    ) -> None:
        """Add the inputs that all layers share.

        Args:
            tape: records the nodes.
            architecture: sizes of the model.
            positions: int64 [1, rows]; a tree needs them.
            tree: whether attention takes positions and a bias.
            rotary: cos and sin of each rotary embedding.
            scales: of each layer's cache, which is int8 with them and in the compute type without.
        """
        self.presents: list[ir.Value] = []
        self._tape = tape
        self._facts = architecture
        self._positions = positions
        self._tree = tree
        self._scales = scales
        self._cache_dtype = tape.dtype if scales is None else ir.DataType.INT8
        self._seqlens_k = self._first_seqlens_k = tape.input("seqlens_k", ir.DataType.INT32, [1])
        self._total_length = tape.input("total_sequence_length", ir.DataType.INT32, [])
        # What is added to the scores, by the window of the layer.
        self._bias = self._biases() if tree else {}
        self._rotary = {rope: [tape.weight(table) for table in tables] for rope, tables in rotary.items()}
        self._prefix = ""

    def begin_step(self, step: int) -> None:
        """Go on with the rows of a later step of the same call, one row each but for those of step 0.

        Every step reads and writes the caches of the call: its kernels find the same memory as their past and as their
        present, and each step has to wait for the one before, whose choice is its token.
        """
        self._prefix = f"{step}."
        if step:
            later = self._tape.constant(f"rows_before.{step}", np.array([step], np.int32))
            self._seqlens_k = self._tape.op("Add", [self._first_seqlens_k, later])

    def attend(self, qkv: ir.Value, layer: PackedLayer, index: int) -> ir.Value:
        """Append the attention of layer ``index``; return compute type [1, rows, heads * head_size]."""
        facts, attention = self._facts, self._facts.attention[index]
        shape: list[int | str] = [1, facts.kv_heads, "capacity", facts.head_size]
        parts = ("key", "value")
        past = [self._tape.input(f"past_key_values.{index}.{part}", self._cache_dtype, shape) for part in parts]
        inputs = [*self._queries_keys_values(qkv, layer, index), *past, self._seqlens_k, self._total_length]
        inputs += [None, None] if attention.rope is None else self._rotary[attention.rope]
        if self._tree:
            inputs += [None if attention.rope is None else self._positions, self._bias[attention.window]]
        if self._scales is not None:
            scales = self._scales[index]
            inputs += [None] * (_SCALE_INPUT - len(inputs))
            inputs += [self._scale(index, "key", scales.key), self._scale(index, "value", scales.value)]
        attended, *present = self._tape.multi(
            "GroupQueryAttention",
            inputs,
            self._attributes(attention),
            outputs=3,
            domain=CONTRIB,
            name=f"{self._prefix}layers.{index}.attention",
        )
        for value, part in zip(present, parts, strict=True):
            self.presents.append(describe(value, f"present.{self._prefix}{index}.{part}", self._cache_dtype, shape))
        return attended

    def _biases(self) -> dict[int | None, ir.Value]:
        """The bias [1, 1, rows, total] by window: the call's own, behind zeros for the cache."""
        tape = self._tape
        own = tape.input("tree_bias", tape.dtype, [1, 1, "rows", "rows"])
        padding = tape.input("tree_bias_padding", ir.DataType.INT64, [2])
        bias = tape.op("Pad", [own, padding, None, tape.constant("bias_columns", np.array([3], np.int64))])
        window = self._facts.window
        if window is None or self._positions is None:
            return {None: bias}
        return {None: bias, window: window_bias(tape, bias, self._positions, padding, window)}

    def _queries_keys_values(self, qkv: ir.Value, layer: PackedLayer, index: int) -> list[ir.Value | None]:
        """What attention reads: the three in one value, or each its own where queries and keys are normed by heads."""
        if layer.q_norm is None or layer.k_norm is None:
            return [qkv, None, None]
        facts, prefix = self._facts, f"{self._prefix}layers.{index}."
        sizes = np.array([facts.heads, facts.kv_heads, facts.kv_heads], np.int64) * facts.head_size
        query, key, value = self._tape.multi(
            "Split", [qkv, self._tape.constant("qkv_sizes", sizes)], {"axis": -1}, outputs=3
        )
        return [
            self._head_norm(query, layer.q_norm, facts.heads, prefix + "q_norm"),
            self._head_norm(key, layer.k_norm, facts.kv_heads, prefix + "k_norm"),
            value,
        ]

    def _head_norm(self, x: ir.Value, gain: ir.TensorProtocol, heads: int, name: str) -> ir.Value:
        """RMS norm of each head [1, rows, heads * head_size]."""
        tape, size = self._tape, self._facts.head_size
        apart = tape.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        together = tape.constant(f"row_{heads}", np.array([0, 0, heads * size], np.int64))
        attributes = {"epsilon": self._facts.norm_epsilon, "axis": -1}
        normed = tape.op("RMSNormalization", [tape.op("Reshape", [x, apart]), tape.weight(gain)], attributes, name=name)
        return tape.op("Reshape", [normed, together])

    def _attributes(self, attention: LayerAttention) -> dict[str, int | float | str]:
        facts = self._facts
        attributes: dict[str, int | float | str] = {
            "num_heads": facts.heads,
            "kv_num_heads": facts.kv_heads,
            "do_rotary": int(attention.rope is not None),
        }
        if facts.attention_scale is not None:
            attributes["scale"] = facts.attention_scale
        if attention.window is not None and not self._tree:
            # Counts slots, which are positions in a chain. In a tree they are not, so there the bias tells.
            attributes["local_window_size"] = attention.window
        if self._scales is not None:
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        return attributes

    def _scale(self, index: int, part: str, scale: np.ndarray) -> ir.Value:
        shaped = scale.reshape(1, self._facts.kv_heads, 1, self._facts.head_size)
        return self._tape.weight(ir.tensor(shaped, name=f"layers.{index}.{part}_scale"))
