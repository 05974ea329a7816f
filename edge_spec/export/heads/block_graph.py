"""Builds the graph of a head that drafts a block at once: DFlash and DSpark (docs/heads-block.md).

Every layer reads keys and values of two kinds: of the target's hidden states (features), which stay in the cache, and
of the block's own rows, which see one another whatever their order. ONNX Runtime's attention is causal and writes what
it is given into the cache. So the block has two rows in it for each of its own: the first has the keys and values, and
behind all of these the second has the queries. A bias hides the keys of the second ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_matrix import look_up, multiply
from edge_spec.export.graph_rotation import rotated, unrotated
from edge_spec.export.graph_stream import ResidualStream, rms_norm
from edge_spec.export.graph_tape import CONTRIB, GraphTape, describe
from edge_spec.export.heads.block_checkpoint import BlockFacts
from edge_spec.export.packing import PackedEmbedding, PackedLayer, PackedMatrix
from edge_spec.export.recipe import Device
from edge_spec.export.rope import Rope
from edge_spec.export.rotation import Rotation

_EVERYTHING = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PackedBlockLayer:
    """One layer as stored: in ``layer``, ``qkv`` has the queries alone, and ``key_value`` has the rest."""

    layer: PackedLayer
    key_value: PackedMatrix


@dataclass(frozen=True)
class PackedBlockHead:
    """A head as stored.

    Attributes:
        fc, hidden_norm: what makes a feature of a token's hidden states.
        fc_rotation: how these are rotated before; ``None`` if they are not.
        layers: in their order.
        rotary: cos and sin [positions, head_size / 2] of its rotary embedding.
        norm: gain of the norm behind the layers.
        to_logits: what its output is multiplied by, element by element, before the target's lm_head, [hidden]; ``None``
            for nothing.
        confidence: weight [hidden, 1] and bias [1]; ``None`` without.
    """

    fc: PackedMatrix
    fc_rotation: Rotation | None
    hidden_norm: ir.TensorProtocol
    layers: tuple[PackedBlockLayer, ...]
    rotary: Mapping[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]
    norm: ir.TensorProtocol
    to_logits: ir.TensorProtocol | None
    confidence: tuple[ir.TensorProtocol, ir.TensorProtocol] | None


@dataclass(frozen=True)
class TargetEnds:
    """What the head shares with its target.

    Attributes:
        embedding, lm_head: as the target stores them.
        rotation: of the stream that they are stored for; ``None`` if it is not rotated.
    """

    embedding: PackedEmbedding
    lm_head: PackedMatrix
    rotation: Rotation | None


def build_block_graph(facts: BlockFacts, head: PackedBlockHead, target: TargetEnds, device: Device) -> ir.Model:
    """Build the graph.

    Args:
        facts: what the head is made of.
        head: its weights.
        target: what it shares.
        device: decides the compute type and the kernels' attributes.
    """
    return _BlockGraph(facts, head, target, device).build()


class _BlockGraph:
    """The nodes of one graph."""

    def __init__(self, facts: BlockFacts, head: PackedBlockHead, target: TargetEnds, device: Device) -> None:
        self._tape = tape = GraphTape(device)
        self._facts, self._sizes, self._head, self._target = facts, facts.architecture, head, target
        self._ids = tape.input("input_ids", ir.DataType.INT64, [1, 1])
        hidden = self._sizes.hidden_size * len(facts.taps)
        self._taps = tape.input("taps", tape.dtype, [1, "tap_rows", hidden])
        self._positions = tape.input("position_ids", ir.DataType.INT64, [1, "key_rows"])
        # Which row of the block's queries, and of the features' and the block's keys, stands in each row of attention.
        self._query_rows = tape.input("query_rows", ir.DataType.INT64, ["rows"])
        self._key_rows = tape.input("key_rows", ir.DataType.INT64, ["rows"])
        self._seqlens_k = tape.input("seqlens_k", ir.DataType.INT32, [1])
        self._total_length = tape.input("total_sequence_length", ir.DataType.INT32, [])
        self._presents: list[ir.Value] = []

    def build(self) -> ir.Model:
        """All of it."""
        tape, head, sizes = self._tape, self._head, self._sizes
        bias, block_positions = self._bias(), self._last_rows(self._positions, "block_positions")
        read = self._taps if head.fc_rotation is None else rotated(tape, self._taps, head.fc_rotation)
        fused = multiply(tape, read, head.fc, None, "fc")
        features = rms_norm(tape, fused, head.hidden_norm, sizes.norm_epsilon, "hidden_norm")
        stream = ResidualStream(tape, sizes, None, self._embedded())
        for index, packed in enumerate(head.layers):
            layer, prefix = packed.layer, f"layers.{index}."
            normed = stream.norm(layer.input_norm, prefix + "input_norm")
            query = multiply(tape, normed, layer.qkv, None, prefix + "query")
            rows = tape.op("Concat", [features, normed], {"axis": 1})
            key_value = multiply(tape, rows, packed.key_value, None, prefix + "key_value")
            attended = self._attend(index, layer, query, key_value, block_positions, bias)
            stream.add(multiply(tape, attended, layer.output, None, prefix + "output"), None, "")
            stream.add_mlp(index, layer)
        stream.keep_rows(tape.input("logit_rows", ir.DataType.INT64, ["logit_rows"]))
        hidden = stream.norm(head.norm, "norm")
        outputs = [self._logits(hidden)]
        if head.confidence is not None:
            weight, added = (tape.weight(tensor) for tensor in head.confidence)
            score = tape.op("Add", [tape.op("MatMul", [hidden, weight], name="confidence"), added])
            outputs.append(describe(self._as_float(score), "confidence", ir.DataType.FLOAT, [1, "logit_rows", 1]))
        return tape.finish([*outputs, *self._presents])

    def _embedded(self) -> ir.Value:
        """The block's rows, compute type [1, block, hidden]: the anchor and masks."""
        tape, block = self._tape, self._facts.block_size
        masks = np.full((1, block - 1), self._facts.mask_token, np.int64)
        ids = tape.op("Concat", [self._ids, tape.constant("mask_ids", masks)], {"axis": 1})
        rows = look_up(tape, ids, self._target.embedding)
        return rows if self._target.rotation is None else unrotated(tape, rows, self._target.rotation)

    def _logits(self, hidden: ir.Value) -> ir.Value:
        """The target's lm_head, which is stored for its own stream."""
        tape, target = self._tape, self._target
        if self._head.to_logits is not None:
            hidden = tape.op("Mul", [hidden, tape.weight(self._head.to_logits)])
        if target.rotation is not None:
            hidden = rotated(tape, hidden, target.rotation)
        logits = self._as_float(multiply(tape, hidden, target.lm_head, None, "lm_head"))
        return describe(logits, "logits", ir.DataType.FLOAT, [1, "logit_rows", target.lm_head.outputs])

    def _attend(
        self,
        index: int,
        layer: PackedLayer,
        query: ir.Value,
        key_value: ir.Value,
        block_positions: ir.Value,
        bias: ir.Value,
    ) -> ir.Value:
        """What the block's rows read in layer ``index``, compute type [1, block, heads * head_size]."""
        tape, facts, prefix = self._tape, self._sizes, f"layers.{index}."
        assert layer.q_norm is not None and layer.k_norm is not None  # as Qwen3 has them
        key, value = tape.multi("Split", [key_value], {"axis": -1, "num_outputs": 2}, outputs=2)
        rope = facts.attention[index].rope
        assert rope is not None
        query = self._head_norm(query, layer.q_norm, facts.heads, prefix + "q_norm")
        key = self._head_norm(key, layer.k_norm, facts.kv_heads, prefix + "k_norm")
        query = self._turned(query, block_positions, rope, facts.heads)
        key = self._turned(key, self._positions, rope, facts.kv_heads)
        query = tape.op("Gather", [query, self._query_rows], {"axis": 1})
        key, value = (tape.op("Gather", [part, self._key_rows], {"axis": 1}) for part in (key, value))
        shape: list[int | str] = [1, facts.kv_heads, "capacity", facts.head_size]
        parts = ("key", "value")
        past = [tape.input(f"past_key_values.{index}.{part}", tape.dtype, shape) for part in parts]
        attributes: dict[str, int | float | str] = {
            "num_heads": facts.heads,
            "kv_num_heads": facts.kv_heads,
            "do_rotary": 0,  # queries and keys have their positions already, which are not those of their slots
        }
        attended, *present = tape.multi(
            "GroupQueryAttention",
            [query, key, value, *past, self._seqlens_k, self._total_length, None, None, None, bias],
            attributes,
            outputs=3,
            domain=CONTRIB,
            name=prefix + "attention",
        )
        for cache, part in zip(present, parts, strict=True):
            self._presents.append(describe(cache, f"present.{index}.{part}", tape.dtype, shape))
        return self._last_rows(attended, "block_rows")

    def _bias(self) -> ir.Value:
        """The bias [1, 1, rows, total], as in the target's graphs."""
        tape = self._tape
        own = tape.input("tree_bias", tape.dtype, [1, 1, "rows", "rows"])
        padding = tape.input("tree_bias_padding", ir.DataType.INT64, [2])
        return tape.op("Pad", [own, padding, None, tape.constant("bias_columns", np.array([3], np.int64))])

    def _last_rows(self, x: ir.Value, name: str) -> ir.Value:
        """The rows at the end that are the block's."""
        tape = self._tape
        first = tape.constant("block_start", np.array([-self._facts.block_size], np.int64))
        stop, axis = tape.constant("rows_stop", np.array([_EVERYTHING], np.int64)), np.array([1], np.int64)
        return tape.op("Slice", [x, first, stop, tape.constant("rows_axis", axis)])

    def _turned(self, x: ir.Value, positions: ir.Value, rope: Rope, heads: int) -> ir.Value:
        """Queries or keys [1, rows, heads * head_size] at their positions."""
        cos, sin = (self._tape.weight(table) for table in self._head.rotary[rope])
        attributes: dict[str, int | float | str] = {"num_heads": heads, "rotary_embedding_dim": rope.size}
        return self._tape.op("RotaryEmbedding", [x, positions, cos, sin], attributes, domain=CONTRIB)

    def _head_norm(self, x: ir.Value, gain: ir.TensorProtocol, heads: int, name: str) -> ir.Value:
        """RMS norm of each head [1, rows, heads * head_size]."""
        tape, size = self._tape, self._sizes.head_size
        apart = tape.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        together = tape.constant(f"row_{heads}", np.array([0, 0, heads * size], np.int64))
        normed = rms_norm(tape, tape.op("Reshape", [x, apart]), gain, self._sizes.norm_epsilon, name)
        return tape.op("Reshape", [normed, together])

    def _as_float(self, x: ir.Value) -> ir.Value:
        tape = self._tape
        return x if tape.dtype == ir.DataType.FLOAT else tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
