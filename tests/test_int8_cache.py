"""An int8 KV cache: what is stored, how far it strays, that it is bitwise like the other, and where it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, ProviderError, RequestError
from edge_spec.export.cache_scales import cache_scales
from edge_spec.manifest import CacheType
from edge_spec.runtime import int8_cache
from edge_spec.runtime.exactness import measure_exactness
from edge_spec.runtime.int8_cache import INT8_ATTENTION_MODEL, takes_int8_cache
from edge_spec.runtime.model import Model
from row_independence import require_bitwise_kernels, require_int8_attention
from tiny_models import HEAD_SIZE, TOKENS

CONTEXT = 120

Bundles = Callable[..., Path]


def load(path: Path, kv: CacheType | None, context: int = CONTEXT) -> Model:
    bundle = open_bundle(path)
    return Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], context, exact_rows=True, kv=kv)


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS, count)]


def held(model: Model) -> dict[str, npt.NDArray[Any]]:
    return {name: value.numpy()[0, :, : model.cache.length].copy() for name, value in model.cache._buffers.items()}


def divergence(logits: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """Mean KL in nats of the rows of ``logits`` [rows, vocab] from those of ``reference``."""
    log_p, log_q = (x - x.max(axis=1, keepdims=True) for x in (reference, logits))
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (log_p, log_q))
    return float(np.sum(np.exp(log_p) * (log_p - log_q), axis=1).mean())


@pytest.fixture
def needs_int8() -> None:
    if not takes_int8_cache():
        pytest.skip("THIS ONNX RUNTIME TAKES NO INT8 KV CACHE")


@pytest.fixture
def path(tiny_bundle: Bundles) -> Path:
    return tiny_bundle(recipe="fp32")


# What is stored


@pytest.mark.usefixtures("needs_int8")
def test_the_first_layer_stores_what_the_other_cache_holds_rounded_to_its_scales(path: Path) -> None:
    tokens = random_tokens(1, 60)
    caches = []
    for kv in ("float32", "int8"):
        model = load(path, kv)
        model.prefill(tokens)
        caches.append(held(model))
    graph = onnx.load(path / "target" / "model.kv8.onnx", load_external_data=False).graph
    scales = {tensor.name: numpy_helper.to_array(tensor)[0] for tensor in graph.initializer if "_scale" in tensor.name}
    exact, rounded = caches
    for part in ("key", "value"):
        scale = scales[f"layers.0.{part}_scale"]
        assert len(np.unique(scale)) > HEAD_SIZE / 2  # every channel has its own
        expected = np.clip(exact[f"0.{part}"] / scale, -128, 127)
        assert rounded[f"0.{part}"].dtype == np.int8
        np.testing.assert_allclose(rounded[f"0.{part}"], expected, rtol=0, atol=0.51)
        assert np.abs(rounded[f"0.{part}"].astype(int)).max() > 20  # the range is made use of


@pytest.mark.usefixtures("needs_int8")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rounding_the_cache_hardly_changes_what_comes_next(tiny_bundle: Bundles, family: str) -> None:
    path = tiny_bundle(recipe="fp32", family=family)
    tokens = random_tokens(2, 100)
    exact, rounded = (load(path, kv).forward(tokens, range(100)).copy() for kv in ("float32", "int8"))
    assert 0 < divergence(rounded, exact) < 0.01


@pytest.mark.usefixtures("needs_int8")
def test_it_takes_a_quarter_of_the_memory(path: Path) -> None:
    plain, rounded = load(path, "float32"), load(path, "int8")
    assert rounded.cache.capacity == plain.cache.capacity
    assert 4 * rounded.cache.memory_bytes == plain.cache.memory_bytes


@given(seed=st.integers(0, 2**32 - 1), outlier=st.floats(1, 1e4))
@settings(max_examples=60, deadline=None)
def test_no_position_takes_a_key_out_of_its_range(seed: int, outlier: float) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((2, 7, 16)).astype(np.float32)
    keys[:, :, 3] *= np.float32(outlier)
    values = rng.standard_normal((2, 7, 16)).astype(np.float32)
    scales = cache_scales(keys, values, 16)
    angles = rng.uniform(0, 2 * np.pi, (7, 8)).astype(np.float32)
    first, second = np.split(keys, 2, axis=2)
    rotated = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=2
    )
    assert (np.abs(rotated) <= 127 * scales.key[:, None]).all()
    assert (np.abs(values) <= 127 * scales.value[:, None]).all()
    # An outlier costs its own pair its resolution and no other channel.
    calm = keys.copy()
    calm[:, :, 3] = 0
    others = [channel for channel in range(16) if channel not in (3, 11)]
    np.testing.assert_array_equal(cache_scales(calm, values, 16).key[:, others], scales.key[:, others])


@pytest.mark.parametrize("rotated", [0, 8])
def test_what_is_not_rotated_has_its_own_range(rotated: int) -> None:
    keys = np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)
    keys[:, :, 5] = 0
    keys[:, :, 13] = 0
    scales, pairs = cache_scales(keys, keys, rotated), cache_scales(keys, keys, 16)
    np.testing.assert_allclose(scales.key[:, rotated:], scales.value[:, rotated:])
    assert (scales.key[:, 13] < 1e-30).all()
    assert (scales.key[:, :rotated] != pairs.key[:, :rotated]).any() == (rotated > 0)


def test_a_channel_that_is_always_zero_has_a_scale_to_divide_by() -> None:
    nothing = np.zeros((2, 5, 8), np.float32)
    scales = cache_scales(nothing, nothing, 8)
    assert (scales.key > 0).all() and (scales.value > 0).all()


# The same cache otherwise


@pytest.mark.parametrize("recipe", ["w8a8", "int4"])
def test_rows_are_bitwise_as_with_the_other_cache(tiny_bundle: Bundles, recipe: str) -> None:
    require_bitwise_kernels()
    require_int8_attention()
    assert measure_exactness(load(tiny_bundle(recipe=recipe), "int8"), TOKENS) == "bitwise"


@pytest.mark.usefixtures("needs_int8")
def test_a_branch_sees_its_own_path_and_can_be_kept(path: Path) -> None:
    tokens, branch = random_tokens(3, 20), random_tokens(4, 3)
    model = load(path, "int8")
    model.prefill([*tokens, *branch])
    chain = held(model)
    logits = model.forward([5], [0]).copy()
    model.cache.rollback(20)
    # Three rows of another path, then the branch, then more that nobody sees.
    mask = np.zeros((8, 8), dtype=bool)
    for rows in (range(3), range(3, 6), range(6, 8)):
        mask[np.ix_(rows, rows)] = np.tri(len(rows), dtype=bool)
    others = random_tokens(5, 5)
    positions = [20, 21, 22, 20, 21, 22, 20, 21]
    model.forward([*others[:3], *branch, *others[3:]], [0], positions, mask)
    before = held(model)
    model.cache.keep(20, [23, 24, 25])
    kept = held(model)
    for name, rows in kept.items():
        np.testing.assert_array_equal(rows, before[name][:, [*range(20), 23, 24, 25]])
        # Attention sums a branch in another order, which may tip a number to its neighbour.
        assert np.abs(rows.astype(int) - chain[name]).max() <= 1
    np.testing.assert_allclose(model.forward([5], [0]), logits, rtol=0, atol=0.2)


@pytest.mark.usefixtures("needs_int8")
def test_a_pretended_past_can_be_computed_with(path: Path) -> None:
    model = load(path, "int8")
    model.cache.fill(100)
    assert model.cache.length == 100
    assert all((rows[:, :100] != 0).all() for rows in held(model).values())
    assert np.isfinite(model.forward([1, 2], [0, 1])).all()
    with pytest.raises(RequestError, match="Cannot fill"):
        model.cache.fill(50)


# Where it is missing


def test_model_bytes_are_what_onnx_builds() -> None:
    helper, types = onnx.helper, onnx.TensorProto
    row, cache = (types.FLOAT, [1, 1, 8]), (types.INT8, [1, 1, 2, 8])
    inputs = {
        **dict.fromkeys(("query", "key", "value"), row),
        **dict.fromkeys(("past_key", "past_value"), cache),
        "seqlens_k": (types.INT32, [1]),
        "total_sequence_length": (types.INT32, []),
        "scale": (types.FLOAT, [1, 1, 1, 8]),
    }
    outputs = {"attended": row, "present_key": cache, "present_value": cache}
    node = helper.make_node(
        "GroupQueryAttention",
        [*list(inputs)[:7], *[""] * 5, "scale", "scale"],
        list(outputs),
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
        k_quant_type="PER_CHANNEL",
        v_quant_type="PER_CHANNEL",
        kv_cache_bit_width=8,
    )
    taken, given_back = (
        [helper.make_tensor_value_info(name, *form) for name, form in forms.items()] for forms in (inputs, outputs)
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "probe", taken, given_back)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    assert model.SerializeToString() == INT8_ATTENTION_MODEL


class OtherRuntime:
    """An ONNX Runtime that refuses the graph, fails to run it, or computes something else."""

    __version__ = "1.2.3"

    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour

    def SessionOptions(self) -> Any:
        return SimpleNamespace()

    def InferenceSession(self, *_: Any, **__: Any) -> Any:
        if self._behaviour == "refuses":
            raise RuntimeError("INVALID_GRAPH")
        return self

    def run(self, *_: Any) -> list[npt.NDArray[np.float32]]:
        if self._behaviour == "fails":
            raise RuntimeError("Tensor type mismatch")
        return [np.full((1, 1, 8), 1.5 if self._behaviour == "computes" else 3, np.float32)]


@pytest.fixture
def forget() -> Iterator[None]:
    takes_int8_cache.cache_clear()
    yield
    takes_int8_cache.cache_clear()


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("behaviour", "expected"), [("refuses", False), ("fails", False), ("differs", False), ("computes", True)]
)
def test_only_a_runtime_that_computes_the_right_thing_takes_it(
    behaviour: str, expected: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_cache, "import_onnxruntime", lambda: OtherRuntime(behaviour))
    assert takes_int8_cache() == expected
    if not expected:
        with pytest.raises(ProviderError, match=r"ONNX Runtime 1.2.3 takes no int8 KV cache. Upgrade it"):
            load(path, "int8")
        assert load(path, None).forward([1], [0]).shape == (1, TOKENS)  # the other cache is there as ever


def test_a_cache_the_bundle_has_no_graph_for_is_refused(path: Path) -> None:
    with pytest.raises(BundleError, match="is for cpu and has no graph with a KV cache in float16, only in float32 or"):
        load(path, "float16")


def test_a_caller_can_insist_on_how_keys_and_values_are_stored(tiny_bundle: Callable[..., Path]) -> None:
    path = tiny_bundle()
    with pytest.raises(RequestError, match="kv is 'int4', expected one of 'float32'"):
        edge_spec.load(path, kv="int4")  # type: ignore[arg-type]
    with edge_spec.load(path, kv="float32", exactness="distribution") as engine:
        assert engine.plan.configuration.target_kv == "float32"
    if takes_int8_cache():
        with edge_spec.load(path, kv="int8", exactness="distribution") as engine:
            assert engine.plan.configuration.target_kv == "int8"
            assert engine.generate([1, 2, 3], max_new_tokens=5).statistics.new_tokens == 5
            assert engine._target.cache.bytes_of(1) * 4 == _float_bytes(engine)


def _float_bytes(engine: edge_spec.Engine) -> int:
    facts = engine.manifest.target.architecture
    return 2 * facts.layers * facts.kv_heads * facts.head_size * 4
