"""A graph run in segments computes what the whole one computes, and holds one segment's weights at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from edge_spec.export import export_pair, graph_run
from edge_spec.export.graph_run import run_graph
from edge_spec.export.segments import SegmentedGraph

Array = npt.NDArray[Any]

TOKENS = np.random.default_rng(3).integers(0, 256, 40)
LAYERS = 3


SELECTED = {"top_ids", "top_logits", "log_sum_exp"}  # of graphs that select


def whole_run(graph: Path, rows: range) -> dict[str, Array]:
    """Every output of the graph that an export looks at, loaded whole as at runtime."""
    segmented = SegmentedGraph(graph, 1 << 40)
    given = graph_run._inputs(segmented.inputs, TOKENS, rows)
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    outputs = [name for name in outputs if name not in SELECTED]
    results = session.run(outputs, {name: given[name] for name in inputs})
    return {name: np.asarray(result[0], np.float32) for name, result in zip(outputs, results, strict=True)}


def segmented_run(graph: Path, rows: range, largest: int) -> dict[str, Array]:
    results: dict[str, Array] = {}

    def on_layer(layer: int, keys: Array, values: Array) -> None:
        results.update({f"present.{layer}.key": keys, f"present.{layer}.value": values})

    logits = run_graph(graph, TOKENS, rows, on_layer, largest)
    return results if logits is None else {**results, "logits": logits}


def require_same(graph: Path, largest: int) -> None:
    rows = range(5, len(TOKENS))
    segments, whole = segmented_run(graph, rows, largest), whole_run(graph, rows)
    assert segments.keys() == whole.keys()
    assert np.ptp(whole["logits"]) > 1
    for name, values in whole.items():
        np.testing.assert_array_equal(segments[name], values, err_msg=name)


KINDS: list[dict[str, Any]] = [
    {"recipe": "fp32"},
    {"recipe": "fp16"},
    {"recipe": "w8a8"},
    {"recipe": "int4"},
    {"recipe": "w8a8", "family": "qwen2"},
    {"recipe": "fp32", "attention_bias": True, "mlp_bias": True},
    {"recipe": "w8a8", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    {"recipe": "int4", "device": "cuda"},
    {"recipe": "fp16", "device": "cuda"},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_segments_compute_bit_for_bit_what_the_whole_graph_does(
    kind: dict[str, Any], tiny_bundle: Callable[..., Path]
) -> None:
    folder = tiny_bundle(num_hidden_layers=LAYERS, **kind) / "target"
    for graph in sorted(folder.glob("*.onnx")):
        if graph.name != "model.kv8.onnx":
            require_same(graph, largest=1)


def test_segments_of_a_real_model_compute_bit_for_bit_what_the_whole_graph_does(
    real_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = export_pair(real_weights("smollm2"), None, tmp_path / "bundle", check=False).path
    require_same(bundle / "target" / "model.onnx", largest=20 << 20)


@pytest.fixture
def graph(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle(num_hidden_layers=LAYERS, recipe="fp32") / "target" / "model.onnx"


def weight_bytes(segmented: SegmentedGraph, index: int) -> int:
    """Bytes of the weights that a segment's model refers to."""
    names = segmented.segments[index].handed
    model = segmented.model(segmented.segments[index], dict.fromkeys(names, np.zeros(1, np.float32)))
    lengths = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
    return sum(int(entries.get("length", 0)) for entries in lengths)


def test_every_layer_and_lm_head_can_be_a_segment(graph: Path) -> None:
    segmented = SegmentedGraph(graph, 1)
    assert len(segmented.segments) == 1 + LAYERS + 1  # the embedding before, lm_head behind
    nodes = [node.name for segment in segmented.segments for node in segment.nodes]
    whole = [node.name for segment in SegmentedGraph(graph, 1 << 40).segments for node in segment.nodes]
    assert nodes == whole
    sizes = [weight_bytes(segmented, index) for index in range(len(segmented.segments))]
    file = (graph.parent / "model.onnx.data").stat().st_size
    assert max(sizes) < 0.4 * file


def test_layers_share_a_segment_up_to_the_limit(graph: Path) -> None:
    layer = weight_bytes(SegmentedGraph(graph, 1), 2)
    segmented = SegmentedGraph(graph, 2 * layer)
    sizes = [weight_bytes(segmented, index) for index in range(len(segmented.segments))]
    assert 2 <= len(sizes) < 2 + LAYERS
    assert max(sizes) <= 2 * layer
    assert len(SegmentedGraph(graph, 1 << 40).segments) == 1


def test_what_no_later_segment_reads_is_not_kept(graph: Path) -> None:
    *others, last = SegmentedGraph(graph, 1).segments
    assert last.kept == frozenset()
    assert all(len(segment.kept) <= 3 for segment in others)  # the residual stream, what joins it, the tree's bias


@pytest.mark.parametrize("largest", [1, 1 << 40])
def test_without_wanted_logits_only_the_caches_come(graph: Path, largest: int) -> None:
    found = segmented_run(graph, range(0), largest)
    assert sorted(found) == sorted(f"present.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value"))
    for name, values in whole_run(graph, range(1)).items():
        if name != "logits":
            np.testing.assert_array_equal(found[name], values)


def test_lm_head_is_not_loaded_when_no_logits_are_wanted(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    run = graph_run._run

    def spy(model: Any, *others: Any) -> Any:
        loaded.extend(tensor.name for tensor in model.graph.initializer)
        return run(model, *others)

    monkeypatch.setattr(graph_run, "_run", spy)
    run_graph(graph, TOKENS, range(0), largest_segment=1)
    assert f"layers.{LAYERS - 1}.down.weight" in loaded
    assert "lm_head.weight" not in loaded
