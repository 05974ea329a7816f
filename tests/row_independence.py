"""Whether this processor's kernels compute a row the same way whatever rows travel with it, measured one by one.

The graphs are made of these kernels. Where one of them fails, bitwise exactness is not to be had from any graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from edge_spec.processor import integer_products_saturate
from edge_spec.runtime.int8_cache import takes_int8_cache

_CONTRIB = "com.microsoft"
_ROWS = 48
_SLICES = [slice(0, 2), slice(0, 34), slice(11, 13), slice(15, 18), slice(20, 27), slice(40, 48)]
_KV_HEADS, _HEADS, _HEAD_SIZE = 2, 6, 16

Arrays = Mapping[str, np.ndarray]


def require_bitwise_kernels() -> None:
    """Skip the test, saying so loudly, where the hardware cannot keep what it claims."""
    if failing := row_dependent_kernels():
        pytest.skip(
            f"THIS PROCESSOR PROMISES NO MORE THAN THE DISTRIBUTION: the rows of {', '.join(failing)} depend on how "
            "many rows are computed together"
        )


def require_int8_attention() -> None:
    """Skip the test, saying so loudly, where attention over an int8 cache is missing or not bitwise."""
    if not takes_int8_cache():
        pytest.skip(f"ONNX RUNTIME {ort.__version__} TAKES NO INT8 KV CACHE")
    if not _attention(np.random.default_rng(5), int8=True):
        pytest.skip("THIS PROCESSOR'S ATTENTION OVER AN INT8 KV CACHE IS NOT BITWISE")


@functools.cache
def row_dependent_kernels() -> tuple[str, ...]:
    """Names of the kernels that computed some row differently in a call of another width.

    Widths are at least two, and even if they exceed an attention block: the runtime makes no other calls.
    """
    probes = {
        "MatMulIntegerToFloat": _integer_product,
        "MatMulNBits": _block_product,
        "GroupQueryAttention": _attention,
        "SkipSimplifiedLayerNormalization": _norm,
    }
    return tuple(name for name, probe in probes.items() if not probe(np.random.default_rng(5)))


def _integer_product(rng: np.random.Generator) -> bool:
    signed = not integer_products_saturate()
    weight = rng.integers(-127, 128, (112, 96)) if signed else rng.integers(1, 256, (112, 96))
    zero = np.array(0 if signed else 128)
    kind = np.int8 if signed else np.uint8
    constants = {
        "weight": weight.astype(kind),
        "one": np.array(1, np.float32),
        "scale": rng.random(96, np.float32),
        "middle": np.array(128, np.uint8),
        "zero": zero.astype(kind),
    }
    run = _kernel("MatMulIntegerToFloat", ["x", *constants], ["y"], constants)
    x = rng.integers(1, 256, (_ROWS, 112)).astype(np.uint8)
    return _slices_agree(x, lambda rows: run({"x": rows[None]})[0][0])


def _block_product(rng: np.random.Generator) -> bool:
    constants = {
        "weight": rng.integers(0, 256, (96, 4, 16)).astype(np.uint8),
        "scale": rng.random((96, 4), np.float32),
        "zero": rng.integers(0, 256, (96, 2)).astype(np.uint8),
    }
    attributes = {"K": 112, "N": 96, "bits": 4, "block_size": 32, "accuracy_level": 4}
    run = _kernel("MatMulNBits", ["x", *constants], ["y"], constants, **attributes)
    x = rng.standard_normal((_ROWS, 112), np.float32)
    return _slices_agree(x, lambda rows: run({"x": rows[None]})[0][0])


def _norm(rng: np.random.Generator) -> bool:
    constants = {"gain": rng.random(112, np.float32)}
    run = _kernel("SkipSimplifiedLayerNormalization", ["x", "x", "gain"], ["y"], constants, epsilon=1e-5)
    x = rng.standard_normal((_ROWS, 112), np.float32)
    return _slices_agree(x, lambda rows: run({"x": rows[None]})[0][0])


def _attention(rng: np.random.Generator, int8: bool = False) -> bool:
    angles = np.arange(_ROWS, dtype=np.float32)[:, None] * rng.random(_HEAD_SIZE // 2, np.float32)
    constants = {"cos": np.cos(angles), "sin": np.sin(angles)}
    inputs = ["x", "", "", "key", "value", "seqlens", "total", "cos", "sin"]
    attributes: dict[str, Any] = {"num_heads": _HEADS, "kv_num_heads": _KV_HEADS, "do_rotary": 1}
    if int8:
        constants["scale"] = np.full((1, _KV_HEADS, 1, _HEAD_SIZE), 0.04, np.float32)
        inputs += ["", "", "", "scale", "scale"]
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    cache_type = np.int8 if int8 else np.float32
    types = dict.fromkeys(("key", "value", "new_key", "new_value"), cache_type)
    run = _kernel("GroupQueryAttention", inputs, ["y", "new_key", "new_value"], constants, types, **attributes)

    def attend(rows: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
        total = key.shape[2] + len(rows)
        lengths = {"seqlens": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
        return run({"x": rows[None], "key": key, "value": value, **lengths})

    x = rng.standard_normal((_ROWS, (_HEADS + 2 * _KV_HEADS) * _HEAD_SIZE), np.float32)
    empty = np.zeros((1, _KV_HEADS, 0, _HEAD_SIZE), cache_type)
    whole, key, value = attend(x, empty, empty)
    return all(
        np.array_equal(attend(x[part], key[:, :, : part.start], value[:, :, : part.start])[0], whole[:, part])
        for part in _SLICES
    )


def _slices_agree(x: np.ndarray, run: Callable[[np.ndarray], np.ndarray]) -> bool:
    whole = run(x)
    return all(np.array_equal(run(x[part]), whole[part]) for part in _SLICES)


def _kernel(
    kind: str,
    inputs: list[str],
    outputs: list[str],
    constants: Arrays,
    numpy_types: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> Callable[[Arrays], list[np.ndarray]]:
    """Return a function that runs one node on the CPU provider; inputs and outputs are float32 unless typed."""
    types = {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, dtype in (numpy_types or {}).items()}
    types |= {"x": TensorProto.UINT8 if kind == "MatMulIntegerToFloat" else TensorProto.FLOAT}
    types |= {"seqlens": TensorProto.INT32, "total": TensorProto.INT32}
    fed = [name for name in dict.fromkeys(inputs) if name and name not in constants]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, outputs, domain=_CONTRIB, **attributes)],
        "probe",
        [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in fed],
        [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in outputs],
        [_initializer(name, value) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(_CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def _initializer(name: str, value: np.ndarray) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor(name, kind, value.shape, value.tobytes(), raw=True)
