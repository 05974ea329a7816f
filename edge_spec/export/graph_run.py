"""Runs a text through a written graph, for its logits and for what attention caches of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from edge_spec.export.segments import SegmentedGraph
from edge_spec.heap import give_back
from edge_spec.onnx_runtime import import_onnxruntime

Float32Array = npt.NDArray[np.float32]
Values = dict[str, npt.NDArray[Any]]

# Told of a layer's index, keys and values: float32 [kv_heads, tokens, head_size] each, keys rotated to their positions.
OnLayer = Callable[[int, Float32Array, Float32Array], None]

# Bytes of weights that ONNX Runtime holds at a time, unless a layer or lm_head alone has more.
LARGEST_SEGMENT = 64 << 20

# What a graph that selects gives besides its logits; nobody here asks for it.
_SELECTED = ("top_logits", "top_ids", "log_sum_exp")

_WEIGHT_FOLDER = "session.model_external_initializers_file_folder_path"


def run_graph(
    graph: Path,
    token_ids: npt.NDArray[np.int64],
    logit_rows: Sequence[int] | range,
    on_layer: OnLayer = lambda layer, keys, values: None,
    largest_segment: int = LARGEST_SEGMENT,
) -> Float32Array | None:
    """Run a text through a graph with a KV cache in its compute type, in one call on the CPU provider.

    It runs in segments, so that the memory this takes does not depend on the number of layers.

    Args:
        graph: the written graph.
        token_ids: int64 [tokens].
        logit_rows: indices of the tokens whose logits are wanted.
        on_layer: told of every layer in turn.
        largest_segment: bytes of weights up to which neighbouring layers run together.

    Returns:
        The logits, float32 [rows wanted, vocab]; ``None`` if none are wanted.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    segmented = SegmentedGraph(graph, largest_segment)
    given = _inputs(segmented.inputs, token_ids, logit_rows)
    values: Values = {}
    layer = 0
    for segment in segmented.segments:
        outputs = [name for name in segment.outputs if name not in _SELECTED and (name != "logits" or len(logit_rows))]
        if not outputs:
            break  # nothing of lm_head is loaded
        feeds = {name: given[name] for name in segment.graph_inputs} | {name: values[name] for name in segment.handed}
        values |= _run(segmented.model(segment, values), graph.parent, outputs, feeds)
        while f"present.{layer}.key" in values:
            cached = (values.pop(f"present.{layer}.{part}")[0] for part in ("key", "value"))
            on_layer(layer, *(np.asarray(part, np.float32) for part in cached))
            layer += 1
        values = {name: value for name, value in values.items() if name in segment.kept or name == "logits"}
    return np.asarray(values["logits"][0], np.float32) if "logits" in values else None


def _inputs(
    declared: Mapping[str, onnx.ValueInfoProto], token_ids: npt.NDArray[np.int64], logit_rows: Sequence[int] | range
) -> Values:
    """What the graph contract's inputs are for a whole text in one call; buffers of the cache are the text's size."""
    rows = len(token_ids)
    return {
        **{name: _zeros(value, rows) for name, value in declared.items()},
        "input_ids": token_ids[None],
        "position_ids": np.arange(rows, dtype=np.int64)[None],
        "seqlens_k": np.array([rows - 1], np.int32),
        "total_sequence_length": np.array(rows, np.int32),
        "logit_rows": np.array(logit_rows, np.int64),
    }


def _zeros(value: onnx.ValueInfoProto, rows: int) -> npt.NDArray[Any]:
    """Zeros of an input's type and shape, with a row of the text for each of its open sizes."""
    declared = value.type.tensor_type
    shape = [size.dim_value or rows for size in declared.shape.dim]
    return np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(declared.elem_type))


def _run(model: onnx.ModelProto, weights: Path, outputs: Sequence[str], feeds: Values) -> Values:
    """Run a segment, whose weights lie in the folder ``weights``, and leave nothing of it in memory."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry(_WEIGHT_FOLDER, str(weights))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(list(outputs), feeds)
    del session
    give_back()
    return dict(zip(outputs, results, strict=True))
