"""Inputs of the down projection mixed with their neighbours: the product stays, outliers cost the others nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle
from edge_spec.export import export_pair
from edge_spec.export.mixing import mix, mixer, run_length
from edge_spec.export.smoothing import smoothing_scale
from tiny_models import random_model, save_checkpoint


def rounded(rows: np.ndarray) -> np.ndarray:
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    return np.asarray(np.rint(rows / step) * step)


@given(st.integers(1, 300))
@settings(deadline=None)
def test_mixed_rows_and_mixed_weights_have_the_same_product(inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x, weight = rng.normal(size=(5, inputs)).astype(np.float32), rng.normal(size=(7, inputs)).astype(np.float32)
    run = run_length(inputs)
    assert inputs % run == 0
    np.testing.assert_allclose(mix(x, run) @ mix(weight, run).T, x @ weight.T, atol=1e-4)


def test_a_run_is_as_long_as_the_width_allows() -> None:
    assert [run_length(inputs) for inputs in (8960, 1536, 100, 48, 45)] == [32, 32, 4, 16, 1]


@pytest.mark.parametrize("run", [2, 32])
def test_every_neighbour_gets_an_equal_part_of_an_outlier(run: int) -> None:
    np.testing.assert_allclose(np.abs(mixer(run)), 1 / np.sqrt(run), rtol=1e-6)


def test_outliers_that_differ_from_row_to_row_cost_less_once_mixed() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(64, 256)).astype(np.float32), rng.normal(size=(96, 256)).astype(np.float32)
    x[np.arange(64), rng.integers(0, 256, 64)] *= 50

    def error(run: int) -> float:
        scale = smoothing_scale(x, weight, "w8a8", run=run)
        product = rounded(mix(x / scale, run)) @ rounded(mix(weight * scale, run)).T
        return float(np.square(product - x @ weight.T).sum())

    assert error(32) < error(1) / 5


@pytest.mark.parametrize(("intermediate", "run"), [(100, 4), (45, 1), (96, 32)])
def test_a_graph_mixes_what_comes_to_down_in_w8a8(intermediate: int, run: int, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model("llama", intermediate_size=intermediate))
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="w8a8")
    open_bundle(report.path)
    graph = onnx.load(report.path / "target" / "model.onnx", load_external_data=False).graph
    mixers = [node.input[1] for node in graph.node if node.op_type == "MatMul"]
    layers = report.manifest.target.architecture.layers
    assert mixers == ([f"mixer.{run}"] * layers if run > 1 else [])
    assert report.manifest.target.quality is not None and report.manifest.target.quality.mean_kl < 0.05


def test_a_graph_whose_down_is_int4_mixes_nothing(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model())
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="int4")
    graph = onnx.load(report.path / "target" / "model.onnx", load_external_data=False).graph
    assert not any(node.op_type == "MatMul" for node in graph.node)
