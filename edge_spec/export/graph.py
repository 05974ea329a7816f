"""Builds the ONNX graph of a decoder by the graph contract (docs/graph-contract.md), one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.cache_scales import CacheScales
from edge_spec.export.graph_attention import GraphAttention
from edge_spec.export.graph_matrix import look_up, multiply
from edge_spec.export.graph_selection import select
from edge_spec.export.graph_stream import ResidualStream
from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.export.packing import PackedModel
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
        self._model = model
        self._prefix = prefix
        self._stream = ResidualStream(tape, architecture, attention, self._embed(ids), prefix)
        for index, layer in enumerate(model.layers):
            self._stream.add_layer(index, layer)

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
            self._stream.keep_rows(rows)
        normed = self._stream.norm(model.final_norm, self._prefix + "final_norm")
        logits = multiply(tape, normed, model.lm_head, None, self._prefix + "lm_head", may_be_empty)
        return logits if tape.dtype == ir.DataType.FLOAT else tape.op("Cast", [logits], {"to": ir.DataType.FLOAT})

    def _embed(self, ids: ir.Value) -> ir.Value:
        """Turn the ids into the residual stream."""
        hidden = look_up(self._tape, ids, self._model.embedding)
        if self._facts.embedding_scale == 1.0:
            return hidden
        scale = self._tape.constant("embedding_scale", self._tape.number(self._facts.embedding_scale))
        return self._tape.op("Mul", [hidden, scale])
