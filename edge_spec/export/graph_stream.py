"""The residual stream of a graph: sublayers read it through a norm and add to it."""

from __future__ import annotations

import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.graph_attention import GraphAttention
from edge_spec.export.graph_matrix import multiply
from edge_spec.export.graph_tape import CONTRIB, GraphTape
from edge_spec.export.packing import PackedLayer


class ResidualStream:
    """The stream after what has been emitted so far."""

    def __init__(
        self,
        tape: GraphTape,
        architecture: Architecture,
        attention: GraphAttention | None,
        start: ir.Value,
        prefix: str = "",
    ) -> None:
        """Begin a stream.

        Args:
            tape: records the nodes.
            architecture: sizes of the model.
            attention: of this graph; ``None`` where only what is added to the stream is given.
            start: compute type [1, rows, hidden].
            prefix: begins the names of nodes, where a graph has several passes.
        """
        self._tape = tape
        self._facts = architecture
        self._attention = attention
        self._hidden = start
        self._prefix = prefix
        # What the last sublayer added, not yet summed into the residual stream: the next norm fuses the sum.
        self._pending: ir.Value | None = None

    def add_layer(self, index: int, layer: PackedLayer, reads: ir.Value | None = None) -> None:
        """Append decoder layer ``index``.

        Args:
            index: 0-based.
            layer: its weights.
            reads: what its attention projects, compute type [1, rows, inputs]; ``None`` for the normed stream.
        """
        tape, prefix = self._tape, f"{self._prefix}layers.{index}."
        assert self._attention is not None
        normed = self.norm(layer.input_norm, prefix + "input_norm") if reads is None else reads
        qkv = multiply(tape, normed, layer.qkv, layer.qkv_bias, prefix + "qkv")
        attended = self._attention.attend(qkv, layer, index)
        update = multiply(tape, attended, layer.output, layer.output_bias, prefix + "output")
        self.add(update, layer.post_attention_norm, prefix + "post_attention_norm")
        self.add_mlp(index, layer)

    def add_mlp(self, index: int, layer: PackedLayer) -> None:
        """Append the second half of decoder layer ``index``, what comes behind its attention."""
        tape, prefix = self._tape, f"{self._prefix}layers.{index}."
        normed = self.norm(layer.mlp_norm, prefix + "mlp_norm")
        gate_up = multiply(tape, normed, layer.gate_up, layer.gate_up_bias, prefix + "gate_up")
        gate, up = tape.multi("Split", [gate_up], {"axis": -1, "num_outputs": 2}, outputs=2)
        activated = tape.op("Mul", [self._activate(gate), up])
        update = multiply(tape, activated, layer.down, layer.down_bias, prefix + "down")
        self.add(update, layer.post_mlp_norm, prefix + "post_mlp_norm")

    def keep_rows(self, rows: ir.Value) -> ir.Value:
        """Go on with some rows alone, int64 [R], and return them, compute type [1, R, hidden]."""
        assert self._pending is not None  # a decoder has layers
        summed = self._tape.op("Add", [self._hidden, self._pending])
        self._hidden, self._pending = self._tape.op("Gather", [summed, rows], {"axis": 1}), None
        return self._hidden

    def norm(self, gain: ir.TensorProtocol, name: str) -> ir.Value:
        """RMS norm of the residual stream, after summing into it what is pending."""
        if self._pending is None:
            return rms_norm(self._tape, self._hidden, gain, self._facts.norm_epsilon, name)
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

    def add(self, update: ir.Value, gain: ir.TensorProtocol | None, name: str) -> None:
        """Let a sublayer add to the residual stream, behind a norm of its own if its family has one."""
        epsilon = self._facts.norm_epsilon
        self._pending = update if gain is None else rms_norm(self._tape, update, gain, epsilon, name)

    def _activate(self, gate: ir.Value) -> ir.Value:
        if self._facts.activation == "gelu_tanh":
            return self._tape.op("Gelu", [gate], {"approximate": "tanh"})
        return self._tape.op("Mul", [gate, self._tape.op("Sigmoid", [gate])])


def rms_norm(tape: GraphTape, x: ir.Value, gain: ir.TensorProtocol, epsilon: float, name: str) -> ir.Value:
    """RMS norm of the last dimension."""
    return tape.op("RMSNormalization", [x, tape.weight(gain)], {"epsilon": epsilon, "axis": -1}, name=name)
