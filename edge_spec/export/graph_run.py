"""Runs a text through a written graph, for its logits and for what attention caches of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
from edge_spec.onnx_runtime import import_onnxruntime

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GraphRun:
    """What a graph made of a text.

    Attributes:
        logits: float32 [rows wanted, vocab].
        keys, values: one array for each layer, float32 [kv_heads, tokens, head_size], keys rotated to their positions.
    """

    logits: Float32Array
    keys: tuple[Float32Array, ...]
    values: tuple[Float32Array, ...]


def run_graph(
    graph: Path, architecture: Architecture, token_ids: npt.NDArray[np.int64], logit_rows: Sequence[int] | range
) -> GraphRun:
    """Run a text through a graph with a KV cache in its compute type, in one call on the CPU provider.

    Args:
        graph: the written graph.
        architecture: sizes of the model.
        token_ids: int64 [tokens].
        logit_rows: indices of the tokens whose logits are wanted.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    rows = len(token_ids)
    dtype = np.float32 if inputs["past_key_values.0.key"].type == "tensor(float)" else np.float16
    cache_shape = (1, architecture.kv_heads, rows, architecture.head_size)
    feeds = {
        "input_ids": token_ids[None],
        "position_ids": np.arange(rows, dtype=np.int64)[None],
        "seqlens_k": np.array([rows - 1], np.int32),
        "total_sequence_length": np.array(rows, np.int32),
        "tree_bias": np.zeros((1, 1, rows, rows), dtype),
        "tree_bias_padding": np.zeros(2, np.int64),
        "logit_rows": np.array(logit_rows, np.int64),
        **{name: np.zeros(cache_shape, dtype) for name in inputs if name.startswith("past_key_values.")},
    }
    outputs = [
        "logits",
        *(f"present.{layer}.{part}" for part in ("key", "value") for layer in range(architecture.layers)),
    ]
    # A chain graph has inputs its nodes do not use, which the optimizer may drop.
    results = session.run(outputs, {name: value for name, value in feeds.items() if name in inputs})
    logits, *cached = (np.asarray(result[0], np.float32) for result in results)
    return GraphRun(logits, tuple(cached[: architecture.layers]), tuple(cached[architecture.layers :]))
