"""Builds the graph of Medusa heads: all of them at once, from hidden states of the target (docs/heads-medusa.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edge_spec.export.graph_matrix import multiply
from edge_spec.export.graph_stream import rms_norm
from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.export.packing import PackedMatrix
from edge_spec.export.recipe import Device


@dataclass(frozen=True)
class PackedMedusaHead:
    """One head as stored: weights and biases of its residual blocks, and its lm_head."""

    blocks: tuple[tuple[PackedMatrix, ir.TensorProtocol], ...]
    lm_head: PackedMatrix


def build_medusa_graph(
    hidden_size: int,
    epsilon: float,
    final_norm: ir.TensorProtocol,
    heads: Sequence[PackedMedusaHead],
    device: Device,
) -> ir.Model:
    """Build the graph.

    Whole rows of logits leave it. To select the likeliest within it takes longer on a CPU than to look through them
    outside, which only happens for heads that are asked (docs/heads-medusa.md).

    Args:
        hidden_size: elements of the target's residual stream.
        epsilon: of its final norm.
        final_norm: the gain of that norm, which the heads read the stream behind.
        heads: all of them, in their order.
        device: decides the compute type and the kernels' attributes.
    """
    tape = GraphTape(device)
    taps = tape.input("taps", tape.dtype, [1, "tap_rows", hidden_size])
    hidden = rms_norm(tape, taps, final_norm, epsilon, "final_norm")
    logits = [_head(tape, hidden, head, f"heads.{index}.") for index, head in enumerate(heads)]
    columns = heads[0].lm_head.outputs
    every = tape.op("Concat", logits, {"axis": 0})
    if tape.dtype != ir.DataType.FLOAT:
        every = tape.op("Cast", [every], {"to": ir.DataType.FLOAT})
    return tape.finish([describe(every, "logits", ir.DataType.FLOAT, [len(heads), "tap_rows", columns])])


def _head(tape: GraphTape, hidden: ir.Value, head: PackedMedusaHead, prefix: str) -> ir.Value:
    """Logits of one head, compute type [1, tap_rows, columns]."""
    for layer, (weight, bias) in enumerate(head.blocks):
        added = multiply(tape, hidden, weight, bias, f"{prefix}blocks.{layer}")
        activated = tape.op("Mul", [added, tape.op("Sigmoid", [added])])
        hidden = tape.op("Add", [hidden, activated])
    return multiply(tape, hidden, head.lm_head, None, prefix + "lm_head")
