"""Builds the graph of a head that drafts one token after another (docs/graph-contract.md)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.graph_attention import GraphAttention
from edge_spec.export.graph_matrix import look_up, multiply
from edge_spec.export.graph_stream import ResidualStream, rms_norm
from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.export.heads.recurrent_packing import PackedHead
from edge_spec.export.recipe import Device
from edge_spec.export.rotation import Rotation


def build_head_graph(architecture: Architecture, head: PackedHead, taps: int, device: Device) -> ir.Model:
    """Build the graph over a packed head.

    Args:
        architecture: sizes of the head.
        head: the weights.
        taps: how many hidden states of the target it reads.
        device: decides the compute type and the kernels' attributes.
    """
    tape = GraphTape(device)
    hidden, epsilon = architecture.hidden_size, architecture.norm_epsilon
    ids = tape.input("input_ids", ir.DataType.INT64, [1, "rows"])
    given = tape.input("taps", tape.dtype, [1, "tap_rows", taps * hidden])
    features = tape.input("features", tape.dtype, [1, "feature_rows", hidden])
    # Positions follow the slots of the cache, so there is neither an input for them nor a bias.
    attention = GraphAttention(tape, architecture, None, False, head.rotary, None)
    rows = tape.input("logit_rows", ir.DataType.INT64, ["logit_rows"])

    fused = given if head.tap_norm is None else rms_norm(tape, given, head.tap_norm, epsilon, "tap_norm")
    if head.fuse is not None:
        fused = multiply(tape, fused, head.fuse, None, "fuse", may_be_empty=True)
    states = tape.op("Concat", [fused, features], {"axis": 1}, name="states")
    embedded = rms_norm(tape, look_up(tape, ids, head.embedding), head.embedding_norm, epsilon, "embedding_norm")
    normed = rms_norm(tape, states, head.hidden_norm, epsilon, "hidden_norm")
    if head.hidden_rotation is not None:
        normed = _rotate(tape, normed, head.hidden_rotation)
    pairs = tape.op("Concat", [embedded, normed], {"axis": -1}, name="pairs")
    if head.join is None:
        stream = ResidualStream(tape, architecture, attention, normed if head.normed_residual else states)
        stream.add_layer(0, head.layer, pairs)
    else:
        joined = multiply(tape, pairs, head.join, None, "join")
        stream = ResidualStream(tape, architecture, attention, joined)
        stream.add_layer(0, head.layer)

    feature = stream.keep_rows(rows)
    final = stream.norm(head.final_norm, "final_norm")
    read = final
    if head.shared_norm is not None and head.rotation is not None:
        read = _rotate(tape, rms_norm(tape, feature, head.shared_norm, epsilon, "shared_norm"), head.rotation)
    logits = multiply(tape, read, head.lm_head, None, "lm_head", may_be_empty=True)
    if tape.dtype != ir.DataType.FLOAT:
        logits = tape.op("Cast", [logits], {"to": ir.DataType.FLOAT})
    feature = final if head.normed_feature else feature
    describe(logits, "logits", ir.DataType.FLOAT, [1, "logit_rows", head.lm_head.outputs])
    describe(feature, "feature", tape.dtype, [1, "logit_rows", hidden])
    return tape.finish([logits, feature, *attention.presents])


def _rotate(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rotate rows [1, R, hidden]. A size has one rotation, so its factors lie in the graph once."""
    dtype = tape.dtype.numpy()
    left, right, signs = (factor.astype(dtype) for factor in rotation.factors)
    apart = tape.constant("stream_apart", np.array([0, 0, len(left), len(right)], np.int64))
    together = tape.constant("stream_together", np.array([0, 0, len(signs)], np.int64))
    signed = tape.op("Mul", [x, tape.constant("rotate_signs", signs)])
    turned = tape.op("MatMul", [tape.op("Reshape", [signed, apart]), tape.constant("rotate_right", right)])
    turned = tape.op("MatMul", [tape.constant("rotate_left", left), turned])
    return tape.op("Reshape", [turned, together])
