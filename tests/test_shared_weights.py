"""Weights lie once on the device, however many sessions compute with them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from edge_spec.bundle import open_bundle
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.runtime.device_settings import DeviceSettings, Lending
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.model import Model
from edge_spec.runtime.shared_weights import SharedWeights, lent_value

SETTINGS = DeviceSettings(resident=True, tree_graph=True)


@pytest.mark.parametrize("recipe", ["fp16", "int4"])
def test_sessions_over_shared_weights_compute_what_others_do(tiny_bundle: Callable[..., Path], recipe: str) -> None:
    bundle = open_bundle(tiny_bundle(recipe=recipe, device="cuda", eos=None))
    record = bundle.manifest.target
    found = []
    for settings in (SETTINGS, replace(SETTINGS, shares_weights=True)):
        model = Model(bundle, record, ["CPUExecutionProvider"], 60, False, threads=1, settings=settings)
        model.prefill([1, 2, 3])
        chain = np.array(model.forward([4, 5], [0, 1]))
        model.cache.rollback(3)
        mask = np.tri(3, dtype=bool)
        mask[2, 1] = False
        found.append((chain, np.array(model.forward([4, 5, 6], range(3), [3, 4, 4], mask))))
    for expected, actual in zip(*found, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_graphs_of_one_model_are_given_the_same_values(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle(recipe="int4", device="cuda", eos=None))
    record = bundle.manifest.target
    shared = SharedWeights(onnxruntime, "cpu")
    chain, tree = (
        shared.values(bundle.path / "target", check_graph(bundle, record, graph).initializers)
        for graph in record.graphs
    )
    assert len(chain) > 4
    assert chain.keys() == tree.keys()
    assert all(chain[name] is tree[name] for name in chain)


@pytest.mark.parametrize("lending", ["dlpack", "binding"])
def test_sessions_read_the_given_memory_and_no_other(tmp_path: Path, lending: Lending) -> None:
    """The file holds zeros here, and what changes in the memory changes for all of them."""
    onnx = pytest.importorskip("onnx")
    rows, columns = 64, 512
    helper, kinds = onnx.helper, onnx.TensorProto
    table = kinds(dims=[rows, columns], data_type=kinds.FLOAT, name="table", data_location=kinds.EXTERNAL)
    for key, value in (("location", "table.data"), ("offset", "0"), ("length", str(4 * rows * columns))):
        table.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "rows"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("rows", kinds.INT64, ["n"])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["n", columns])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "table.data").write_bytes(bytes(4 * rows * columns))
    numbers = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    weights = {"table": lent_value(onnxruntime, numbers, "cpu", lending)}
    sessions = [
        GraphSession(onnxruntime, tmp_path / "model.onnx", False, ["CPUExecutionProvider"], 1, weights=weights)
        for _ in range(2)
    ]
    for _ in range(2):
        for opened in sessions:
            (found,) = opened.session.run(None, {"rows": np.array([7, 30])})
            np.testing.assert_array_equal(found, numbers[[7, 30]])
        numbers *= 2
        weights["table"].owner.update_inplace(numbers)


@pytest.mark.parametrize("lending", ["dlpack", "binding"])
@pytest.mark.parametrize("dtype", [np.float16, np.uint8, np.float32])
def test_a_lent_value_does_not_own_its_memory(lending: Lending, dtype: type) -> None:
    numbers = np.array([[1, 2, 3]], dtype)
    options = onnxruntime.SessionOptions()
    owned = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1, 3], dtype)
    with pytest.raises(RuntimeError, match="owned by the user"):
        options.add_initializer("weight", owned)
    lent = lent_value(onnxruntime, numbers, "cpu", lending)
    options.add_initializer("weight", lent)
    gc.collect()
    np.testing.assert_array_equal(lent.numpy(), numbers)
    assert lent.data_ptr() == lent.owner.data_ptr()
