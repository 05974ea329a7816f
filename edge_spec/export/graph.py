"""Builds the ONNX graph of a decoder by the graph contract (docs/graph-contract.md), one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.cache_scales import CacheScales
from edge_spec.export.graph_attention import GraphAttention
from edge_spec.export.graph_matrix import look_up, multiply
from edge_spec.export.graph_selection import select
from edge_spec.export.graph_tape import CONTRIB, GraphTape, describe
from edge_spec.export.packing import PackedEmbedding, PackedLayer, PackedModel
from edge_spec.export.recipe import Device


def build_graph(
    architecture: Architecture,
    model: PackedModel,
    device: Device,
    tree: bool,
    scales: Sequence[CacheScales] | None = None,
    selects_of: int | None = None,
) -> ir.Model:
    """Build one graph over a packed model.

    Args:
        architecture: sizes of the model.
        model: the weights; a chain graph and a tree graph can share them.
        device: decides the compute type (float32 or float16) and the kernels' attributes.
        tree: whether attention takes positions and a bias, which a proposal tree needs.
        scales: of each layer's cache, which is int8 with them and in the compute type without.
        selects_of: columns of the logits that stand for ids, for a graph that selects the likeliest of them;
            ``None`` for one that only gives logits.
    """
    tape = GraphTape(device)
    ids = tape.input("input_ids", ir.DataType.INT64, [1, "rows"])
    positions = tape.input("position_ids", ir.DataType.INT64, [1, "rows"])
    attention = GraphAttention(tape, architecture, positions, tree, model.rotary, scales)
    logit_rows = tape.input("logit_rows", ir.DataType.INT64, ["logit_rows"])
    decoder = DecoderPass(tape, architecture, attention, ids, model)
    logits = decoder.logits(logit_rows, may_be_empty=True)
    describe(logits, "logits", ir.DataType.FLOAT, [1, "logit_rows", model.lm_head.outputs])
    selected = [] if selects_of is None else select(tape, logits, model.lm_head.outputs, selects_of)
    return tape.finish([logits, *selected, *attention.presents])


class DecoderPass:
    """One way through the layers: the residual stream, and what has been emitted so far."""

    def __init__(
        self,
        tape: GraphTape,
        architecture: Architecture,
        attention: GraphAttention,
        ids: ir.Value,
        model: PackedModel,
        prefix: str = "",
    ) -> None:
        """Append the embedding and all layers.

        Args:
            tape: records the nodes.
            architecture: sizes of the model.
            attention: of this graph.
            ids: int64 [1, rows], the tokens.
            model: the weights.
            prefix: begins the names of nodes, where a graph has several passes.
        """
        self._tape = tape
        self._facts = architecture
        self._attention = attention
        self._model = model
        self._prefix = prefix
        self._hidden = ids
        # What the last sublayer added, not yet summed into the residual stream: the next norm fuses the sum.
        self._pending: ir.Value | None = None
        self._embed(model.embedding)
        for index, layer in enumerate(model.layers):
            self._add_layer(index, layer)

    def logits(self, rows: ir.Value | None, may_be_empty: bool = False) -> ir.Value:
        """Append the final norm and lm_head.

        Args:
            rows: int64 [R], which rows are wanted; ``None`` for all.
            may_be_empty: whether that may be none.

        Returns:
            float32 [1, R, columns].
        """
        tape, model = self._tape, self._model
        if rows is not None:
            assert self._pending is not None  # a decoder has layers
            summed = tape.op("Add", [self._hidden, self._pending])
            self._hidden, self._pending = tape.op("Gather", [summed, rows], {"axis": 1}), None
        normed = self._norm(model.final_norm, self._prefix + "final_norm")
        logits = multiply(tape, normed, model.lm_head, None, self._prefix + "lm_head", may_be_empty)
        return logits if tape.dtype == ir.DataType.FLOAT else tape.op("Cast", [logits], {"to": ir.DataType.FLOAT})

    def _embed(self, embedding: PackedEmbedding) -> None:
        """Turn the ids into the residual stream."""
        self._hidden = look_up(self._tape, self._hidden, embedding)
        if self._facts.embedding_scale != 1.0:
            scale = self._tape.constant("embedding_scale", self._tape.number(self._facts.embedding_scale))
            self._hidden = self._tape.op("Mul", [self._hidden, scale])

    def _add_layer(self, index: int, layer: PackedLayer) -> None:
        """Append decoder layer ``index``."""
        tape, prefix = self._tape, f"{self._prefix}layers.{index}."
        normed = self._norm(layer.input_norm, prefix + "input_norm")
        qkv = multiply(tape, normed, layer.qkv, layer.qkv_bias, prefix + "qkv")
        attended = self._attention.attend(qkv, layer, index)
        update = multiply(tape, attended, layer.output, layer.output_bias, prefix + "output")
        self._add(update, layer.post_attention_norm, prefix + "post_attention_norm")

        normed = self._norm(layer.mlp_norm, prefix + "mlp_norm")
        gate_up = multiply(tape, normed, layer.gate_up, layer.gate_up_bias, prefix + "gate_up")
        gate, up = tape.multi("Split", [gate_up], {"axis": -1, "num_outputs": 2}, outputs=2)
        activated = tape.op("Mul", [self._activate(gate), up])
        update = multiply(tape, activated, layer.down, layer.down_bias, prefix + "down")
        self._add(update, layer.post_mlp_norm, prefix + "post_mlp_norm")

    def _norm(self, gain: ir.TensorProtocol, name: str) -> ir.Value:
        """RMS norm of the residual stream, after summing into it what is pending."""
        if self._pending is None:
            return self._rms_norm(self._hidden, gain, name)
        normed, _, _, self._hidden = self._tape.multi(
            "SkipSimplifiedLayerNormalization",
            [self._hidden, self._pending, self._tape.weight(gain)],
            {"epsilon": self._facts.norm_epsilon},
            outputs=4,
            domain=CONTRIB,
            name=name,
        )
        self._pending = None
        return normed

    def _add(self, update: ir.Value, gain: ir.TensorProtocol | None, name: str) -> None:
        """Let a sublayer add to the residual stream, behind a norm of its own if its family has one."""
        self._pending = update if gain is None else self._rms_norm(update, gain, name)

    def _rms_norm(self, x: ir.Value, gain: ir.TensorProtocol, name: str) -> ir.Value:
        attributes = {"epsilon": self._facts.norm_epsilon, "axis": -1}
        return self._tape.op("RMSNormalization", [x, self._tape.weight(gain)], attributes, name=name)

    def _activate(self, gate: ir.Value) -> ir.Value:
        if self._facts.activation == "gelu_tanh":
            return self._tape.op("Gelu", [gate], {"approximate": "tanh"})
        return self._tape.op("Mul", [gate, self._tape.op("Sigmoid", [gate])])
