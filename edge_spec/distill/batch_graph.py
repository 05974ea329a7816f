"""A written graph made over for several texts at a time, with taps and the likeliest tokens as its outputs.

The nodes of the layers stay as they are, so each text is computed as the bundle's own graph computes it. What goes is
the bias of trees, which texts do not need, and which would need a row for each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from edge_spec.distill.tapped_text import TOP_TOKENS
from edge_spec.export.graph_taps import set_taps
from edge_spec.export.rotation import Rotation

# Inputs of GroupQueryAttention.
_BIAS_INPUT = 10
_BATCHED = ("input_ids", "position_ids", "seqlens_k", "past_key_values.", "present.", "hidden.")


def batch_graph(
    path: Path,
    taps: Sequence[int],
    layers: int,
    hidden_size: int,
    usable: int,
    window: int | None,
    formats: Sequence[object],
) -> onnx.ModelProto:
    """Return the graph with a symbolic batch, to be loaded beside its weights.

    Inputs are those of the graph contract with the batch as their first size, ``seqlens_k`` int32 [batch] with what
    each text has, and ``total_sequence_length`` the longest of them. Outputs are ``hidden.i`` float32 [batch, rows, D]
    in the checkpoint's basis, ``top_logits`` float32 and ``top_ids`` int64 [batch, logit_rows, N], ``log_sum_exp``
    float32 [batch, logit_rows], and the presents.

    Args:
        path: a native graph for the CPU.
        taps: layers, from 1 to ``layers``, after which the residual stream is wanted; there may be none.
        layers: of the model.
        hidden_size: of the residual stream.
        usable: how many columns of the logits stand for ids.
        window: tokens that layers with a sliding window see.
        formats: those of the model's matrices.
    """
    written = ir.load(str(path))
    rotation = Rotation(hidden_size) if taps and _is_rotated(written.graph, formats) else None
    set_taps(written, taps, layers, hidden_size, ir.DataType.FLOAT, rotation)
    model = ir.to_proto(written)
    graph = model.graph
    del graph.value_info[:]
    _drop_bias(graph, window)
    for value in (*graph.input, *graph.output):
        if value.name.startswith(_BATCHED):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    kept = [value for value in graph.output if value.name != "logits"]
    columns = next(value for value in graph.output if value.name == "logits").type.tensor_type.shape.dim[2].dim_value
    outputs = [*_select(graph, columns, usable), *kept]
    del graph.output[:]
    graph.output.extend(outputs)
    return model


def _is_rotated(graph: ir.Graph, formats: Sequence[object]) -> bool:
    """Tell whether the residual stream is rotated (docs/quantization.md): for w8a8, if no sublayer ends in a norm."""
    return "w8a8" in formats and all(node.name != "layers.0.post_attention_norm" for node in graph)


def _drop_bias(graph: onnx.GraphProto, window: int | None) -> None:
    """Let attention be causal without a bias; layers with a window count slots instead, as texts are chains."""
    full = next((node.output[0] for node in graph.node if node.op_type == "Pad" and node.input[0] == "tree_bias"), None)
    for node in graph.node:
        if node.op_type == "GroupQueryAttention" and len(node.input) > _BIAS_INPUT:
            if node.input[_BIAS_INPUT] not in (full, "") and window is not None:
                node.attribute.append(onnx.helper.make_attribute("local_window_size", window))
            node.input[_BIAS_INPUT] = ""
    for name in ("tree_bias", "tree_bias_padding"):
        for value in [value for value in graph.input if value.name == name]:
            graph.input.remove(value)
    _drop_unread(graph)


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove nodes that nobody reads, from the last to the first."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if not read.intersection(node.output):
            graph.node.remove(node)
            read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}


def _select(graph: onnx.GraphProto, columns: int, usable: int) -> list[onnx.ValueInfoProto]:
    """Append the nodes that choose the likeliest tokens of each row, and return their outputs."""

    def constant(name: str, value: int) -> str:
        graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]))
        return name

    make, logits, last = onnx.helper.make_node, "logits", constant("select.last", -1)
    if usable < columns:
        ends = [constant("select.first", 0), constant("select.usable", usable)]
        graph.node.append(make("Slice", [logits, *ends, last], ["select.logits"]))
        logits = "select.logits"
    most = min(TOP_TOKENS, usable)
    graph.node.append(make("TopK", [logits, constant("select.count", most)], ["top_logits", "top_ids"], axis=-1))
    graph.node.append(make("ReduceLogSumExp", [logits, last], ["log_sum_exp"], keepdims=0))
    describe = onnx.helper.make_tensor_value_info
    return [
        describe("top_logits", onnx.TensorProto.FLOAT, ["batch", "logit_rows", most]),
        describe("top_ids", onnx.TensorProto.INT64, ["batch", "logit_rows", most]),
        describe("log_sum_exp", onnx.TensorProto.FLOAT, ["batch", "logit_rows"]),
    ]
