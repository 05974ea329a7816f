"""What of CUDA works on this machine, found out by running it.

Versions do not tell: wheels for Jetsons are built from other sources and for other GPUs than those of the registry.
Every probe runs a graph of one node whose result is known, and says what went wrong, or ``None``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, get_args

import numpy as np

from edge_spec.errors import ProviderError
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.cuda_options import cuda_options
from edge_spec.runtime.device_settings import CUDA_GRAPHS, DeviceSettings, Lending
from edge_spec.runtime.graph_session import said
from edge_spec.runtime.probe_models import (
    ATTENTION_MODEL,
    HALF_PRODUCT_MODEL,
    INT4_PRODUCT_MODEL,
    TREE_ATTENTION_MODEL,
    WEIGHTED_SUM_MODEL,
)
from edge_spec.runtime.provider import CUDA_PROVIDER, repair_advice
from edge_spec.runtime.shared_weights import lent_value

_HEAD, _HEADS, _SLOTS = 64, 2, 8
_INT4_SIZE, _INT4_ROWS = 1024, 8
_TIMED_RUNS = 20


@dataclass(frozen=True)
class CudaFeatures:
    """Why something does not work here; ``None`` for what does.

    Attributes:
        half: products of float16 matrices.
        attention: attention over a cache that is updated in place.
        trees: the same with positions and a bias.
        int4: products with 4-bit weights, of one row and of several.
        graphs: CUDA graphs that are captured and replayed.
        shared_weights: one copy of weights for several sessions.
        lending: how it is given to them.
        int4_rows_cost: how many times as long as one row 8 rows take in a product with 4-bit weights (1024 by 1024,
            with what a call costs besides); ``None`` where it does not run. Told, but decides nothing: the controller
            goes by the calls of the model itself.
    """

    half: str | None
    attention: str | None
    trees: str | None
    int4: str | None
    graphs: str | None
    shared_weights: str | None
    lending: Lending = "dlpack"
    int4_rows_cost: float | None = None


class _Prober:
    """Runs graphs of one node on a device."""

    def __init__(self, onnxruntime: Any, provider: str, device: str) -> None:
        self._ort, self._provider, self.device = onnxruntime, provider, device

    def session(self, model: bytes, graphs: bool = False, weights: Mapping[str, Any] | None = None) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 4  # whatever goes wrong becomes the answer, not a log line
        options.enable_mem_pattern = False
        for name, value in (weights or {}).items():
            options.add_initializer(name, value)
        providers: list[Any] = [self._provider]
        if self._provider == CUDA_PROVIDER:
            providers = [(CUDA_PROVIDER, cuda_options(None, graphs))]
            # A node that no kernel of this provider takes is to fail, not to run elsewhere.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return self._ort.InferenceSession(model, options, providers=providers)

    def value(self, array: np.ndarray, on_cpu: bool = False) -> Any:
        value = self._ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, "cpu" if on_cpu else self.device
        )
        value.update_inplace(array)
        return value

    def bound(self, session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        binding = session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding

    def run(self, session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        session.run_with_iobinding(self.bound(session, inputs, outputs))

    def run_options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options


def probe_features(onnxruntime: Any, provider: str, device: str) -> CudaFeatures:
    """Run all probes.

    Args:
        onnxruntime: the imported module.
        provider: name of the execution provider.
        device: what its values lie on, ``"cuda"`` or, to try the probes themselves, ``"cpu"``.
    """
    prober = _Prober(onnxruntime, provider, device)
    costs: list[float] = []
    sharing = {way: _reason(partial(_shared_weights, prober, way)) for way in get_args(Lending)}
    lending: Lending = next((way for way, reason in sharing.items() if reason is None), "dlpack")
    return CudaFeatures(
        half=_reason(lambda: _half(prober)),
        attention=_reason(lambda: _attention(prober)),
        trees=_reason(lambda: _trees(prober)),
        int4=_reason(lambda: _int4(prober, costs)),
        graphs=_reason(lambda: _graphs(prober)),
        shared_weights=None if None in sharing.values() else sharing[lending],
        lending=lending,
        int4_rows_cost=costs[0] if costs else None,
    )


@functools.cache
def cuda_features() -> CudaFeatures:
    """What works on this machine's GPU; probed once a process, which takes a second or two."""
    return probe_features(import_onnxruntime(), CUDA_PROVIDER, "cuda")


def settings_for(
    providers: Sequence[str], memory_limit: int | None = None, features: CudaFeatures | None = None
) -> DeviceSettings:
    """How models use the device of a provider.

    Args:
        providers: execution providers, the one that does the work first.
        memory_limit: most bytes of a session's arena, ``None`` for no limit.
        features: what works; ``None`` finds out.

    Raises:
        ProviderError: not even a graph for chains runs there.
    """
    if providers[0] != CUDA_PROVIDER:
        return DeviceSettings()
    features = features or cuda_features()
    for what, reason in (("float16 products", features.half), ("attention in float16", features.attention)):
        if reason is not None:
            raise ProviderError(f"CUDA runs here, but not {what}: {reason} {repair_advice(reason)}")
    reasons = {
        "trees": features.trees or features.shared_weights,
        "4-bit weights": features.int4,
        CUDA_GRAPHS: features.graphs,
    }
    return DeviceSettings(
        "cuda",
        resident=True,
        captures=features.graphs is None,
        # Two copies of the weights would cost more than branches bring.
        tree_graph=features.trees is None and features.shared_weights is None,
        shares_weights=features.shared_weights is None,
        lending=features.lending,
        options=cuda_options(memory_limit, features.graphs is None),
        lacks=tuple(f"{what}: {reason}" for what, reason in reasons.items() if reason is not None),
    )


def _reason(probe: Callable[[], bool]) -> str | None:
    """Why a probe failed, in one line."""
    try:
        return None if probe() else "it computes wrong results."
    except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
        return said(error)


def _half(prober: _Prober) -> bool:
    a = np.arange(4 * 64, dtype=np.float16).reshape(4, 64) / 256
    b = np.eye(64, dtype=np.float16)
    y = prober.value(np.zeros((4, 64), np.float16))
    prober.run(prober.session(HALF_PRODUCT_MODEL), {"a": prober.value(a), "b": prober.value(b)}, {"y": y})
    return np.array_equal(y.numpy(), a)


def _attend(prober: _Prober, model: bytes, bias: np.ndarray | None) -> np.ndarray:
    """What three rows see: the mean of the values before them, since queries and keys are zero."""
    rows = 3
    qkv = np.zeros((1, rows, (_HEADS + 2) * _HEAD), np.float16)
    qkv[0, :, -_HEAD:] = np.array([3, 6, 12])[:, None]
    keys, values = (prober.value(np.zeros((1, 1, _SLOTS, _HEAD), np.float16)) for _ in range(2))
    attended = prober.value(np.zeros((1, rows, _HEADS * _HEAD), np.float16))
    inputs = {
        "qkv": prober.value(qkv),
        "past_key": keys,
        "past_value": values,
        "seqlens_k": prober.value(np.array([rows - 1], np.int32)),
        "total_sequence_length": prober.value(np.array(rows, np.int32), on_cpu=True),
        "cos": prober.value(np.ones((16, _HEAD // 2), np.float16)),
        "sin": prober.value(np.zeros((16, _HEAD // 2), np.float16)),
    }
    if bias is not None:
        inputs["position_ids"] = prober.value(np.array([[0, 1, 1]], np.int64))
        inputs["bias"] = prober.value(bias.astype(np.float16).reshape(1, 1, rows, rows))
    outputs = {"attended": attended, "present_key": keys, "present_value": values}
    prober.run(prober.session(model), inputs, outputs)
    found: np.ndarray = attended.numpy()[0, :, 0].astype(np.float32)
    cached = values.numpy()[0, 0, :rows, 0].astype(np.float32)
    return np.concatenate([found, cached])


def _attention(prober: _Prober) -> bool:
    return np.allclose(_attend(prober, ATTENTION_MODEL, None), [3, 4.5, 7, 3, 6, 12], atol=1e-2)


def _trees(prober: _Prober) -> bool:
    bias = np.zeros((3, 3))
    bias[2, 1] = -np.inf  # the third row is a sibling of the second
    return np.allclose(_attend(prober, TREE_ATTENTION_MODEL, bias), [3, 4.5, 7.5, 3, 6, 12], atol=1e-2)


def _int4(prober: _Prober, costs: list[float]) -> bool:
    size = _INT4_SIZE
    session = prober.session(INT4_PRODUCT_MODEL)
    weights = {
        "b": prober.value(np.full((size, size // 32, 16), 0x99, np.uint8)),  # 9 - 8: ones
        "scales": prober.value(np.full(size * size // 32, 1 / 256, np.float16)),
    }
    right, seconds = True, []
    for rows in (1, _INT4_ROWS):
        a = np.repeat(np.arange(1, rows + 1, dtype=np.float16)[:, None] / 8, size, axis=1)
        y = prober.value(np.zeros((rows, size), np.float16))
        binding = prober.bound(session, {"a": prober.value(a), **weights}, {"y": y})
        times = []
        for _ in range(_TIMED_RUNS):
            started = perf_counter()
            session.run_with_iobinding(binding)
            times.append(perf_counter() - started)
        seconds.append(median(times))
        right = right and np.allclose(y.numpy(), a * (size / 256), rtol=1e-2)
    costs.append(seconds[1] / seconds[0])
    return right


def _graphs(prober: _Prober) -> bool:
    """Capture a sum of two numbers of graphs, and replay it on other numbers."""
    session = prober.session(WEIGHTED_SUM_MODEL, graphs=True)
    x, y = (prober.value(np.zeros(4, np.float32)) for _ in range(2))
    binding = prober.bound(session, {"x": x}, {"y": y})
    right = True
    for graph, number in ((1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0), (2, 5.0), (1, 6.0), (-1, 7.0)):
        x.update_inplace(np.full(4, number, np.float32))
        session.run_with_iobinding(binding, prober.run_options(graph))
        right = right and np.array_equal(y.numpy(), np.full(4, number + 1, np.float32))
    return right


def _shared_weights(prober: _Prober, lending: Lending) -> bool:
    """Change the shared value under two sessions, and look whether both have noticed."""
    lent = lent_value(prober._ort, np.full(4, 2.0, np.float32), prober.device, lending)
    sessions = [prober.session(WEIGHTED_SUM_MODEL, weights={"weight": lent}) for _ in range(2)]
    x, y = (prober.value(np.zeros(4, np.float32)) for _ in range(2))
    for number in (2.0, 3.0):
        lent.owner.update_inplace(np.full(4, number, np.float32))
        for session in sessions:
            prober.run(session, {"x": x}, {"y": y})
            if not np.array_equal(y.numpy(), np.full(4, number, np.float32)):
                raise ProviderError("sessions make copies of the weights that they are given")
    return True
