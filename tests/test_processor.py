"""The saturation probe against what the two kinds of processor are known to compute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.processor import (
    INTEGER_PRODUCT_MODEL,
    integer_product,
    integer_products_saturate,
)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int32) @ b.astype(np.int32)


def saturated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Neighbouring products are added in 16 bits with saturation, the sums of pairs in 32 bits."""
    products = a.astype(np.int32)[:, :, None] * b.astype(np.int32)[None]
    pairs = np.clip(products[:, 0::2] + products[:, 1::2], -32768, 32767)
    return pairs.sum(axis=1, dtype=np.int32)


def test_model_bytes_are_what_onnx_builds() -> None:
    helper = pytest.importorskip("onnx").helper
    types = pytest.importorskip("onnx").TensorProto
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "probe",
        [
            helper.make_tensor_value_info("a", types.UINT8, [2, 64]),
            helper.make_tensor_value_info("b", types.INT8, [64, 16]),
        ],
        [helper.make_tensor_value_info("y", types.INT32, [2, 16])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert model.SerializeToString() == INTEGER_PRODUCT_MODEL


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(0, 256, -128, 128), (250, 256, 120, 128), (250, 256, -128, -120)]))
def test_products_are_exact_or_saturated_as_the_probe_says(seed: int, ranges: tuple[int, int, int, int]) -> None:
    low_a, high_a, low_b, high_b = ranges
    rng = np.random.default_rng(seed)
    a = rng.integers(low_a, high_a, (2, 64), dtype=np.uint8)
    b = rng.integers(low_b, high_b, (64, 16), dtype=np.int8)
    expected = saturated(a, b) if integer_products_saturate() else exact(a, b)
    np.testing.assert_array_equal(integer_product(a, b), expected)


def test_seven_bit_weights_are_exact_on_every_processor() -> None:
    a = np.full((2, 64), 255, np.uint8)
    b = np.tile(np.array([63, -64], np.int8), (64, 8))
    np.testing.assert_array_equal(integer_product(a, b), exact(a, b))


@pytest.mark.parametrize("rows", [1, 2, 8, 17])
@pytest.mark.parametrize("inputs", [64, 97, 8960])
def test_unsigned_weights_around_128_are_exact_on_every_processor(rows: int, inputs: int) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    helper, types, contrib = onnx.helper, onnx.TensorProto, "com.microsoft"
    rng = np.random.default_rng(inputs + rows)
    # The ends of both ranges, in every order, and rows and columns of nothing else.
    a = rng.choice(np.array([1, 255], np.uint8), (rows, inputs))
    b = rng.choice(np.array([1, 255], np.uint8), (inputs, 24))
    a[0], b[:, 0], b[:, 1] = 255, 255, 1
    constants = {"one": np.float32(1), "scales": np.ones(24, np.float32), "middle": np.uint8(128), "b": b}
    node = helper.make_node(
        "MatMulIntegerToFloat", ["a", "b", "one", "scales", "middle", "middle"], ["y"], domain=contrib
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("a", types.UINT8, a.shape)],
        [helper.make_tensor_value_info("y", types.FLOAT, [rows, 24])],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(contrib, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = (a.astype(np.int64) - 128) @ (b.astype(np.int64) - 128)
    # Float32 holds integers up to 2**24 exactly; the largest sums are beyond, rounded once.
    np.testing.assert_array_equal(session.run(None, {"a": a})[0], wanted.astype(np.float32))
