"""A bundle runs on the device it was exported for, and CUDA counts only if it really runs."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from edge_spec.errors import MissingDependencyError, ProviderError, RequestError
from edge_spec.runtime.provider import CPU_PROVIDER, CUDA_PROVIDER, PROBE_MODEL, cuda_failure, select_provider


class FakeSession:
    """An ONNX Runtime session that behaves as one on a machine we do not have."""

    providers = (CUDA_PROVIDER, CPU_PROVIDER)
    factor = 1.0
    error: Exception | None = None

    def __init__(self, model: bytes, options: object, providers: list[str]) -> None:
        assert model == PROBE_MODEL
        assert providers == [CUDA_PROVIDER]

    def get_providers(self) -> list[str]:
        return list(self.providers)

    def run(self, names: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if self.error is not None:
            raise self.error
        return [feeds["a"] @ feeds["b"] * self.factor]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    """Pretend that ONNX Runtime was built with CUDA, and that sessions behave as the returned class says."""
    import onnxruntime

    class Session(FakeSession):
        pass

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER, CPU_PROVIDER])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    return Session


def test_model_bytes_are_what_onnx_builds() -> None:
    onnx = pytest.importorskip("onnx")
    a, b, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "aby")
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["y"])], "probe", [a, b], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    assert model.SerializeToString() == PROBE_MODEL


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cpu_bundle_runs_on_the_cpu(device: str) -> None:
    assert select_provider(device, "cpu") == [CPU_PROVIDER]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_cuda_bundle_runs_on_cuda_when_the_probe_does(session: type[FakeSession], device: str) -> None:
    assert select_provider(device, "cuda") == [CUDA_PROVIDER, CPU_PROVIDER]


@pytest.mark.parametrize(("device", "bundle_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_naming_another_device_than_the_bundle_has_is_refused(device: str, bundle_device: str) -> None:
    with pytest.raises(ProviderError, match=f"exported for '{bundle_device}'.*--device {device}"):
        select_provider(device, bundle_device)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(RequestError, match="'tpu'.*'auto', 'cpu', 'cuda'"):
        select_provider("tpu", "cpu")


def test_onnxruntime_without_cuda_is_told_from_broken_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU_PROVIDER])
    with pytest.raises(ProviderError, match=r"built without CUDA.*edge-spec\[gpu\].*--device cpu"):
        select_provider("auto", "cuda")


def test_cuda_that_silently_falls_back_is_refused(session: type[FakeSession]) -> None:
    session.providers = (CPU_PROVIDER,)
    with pytest.raises(ProviderError, match="cannot be loaded"):
        select_provider("auto", "cuda")


def test_cuda_without_a_kernel_for_this_gpu_is_refused_in_one_line(session: type[FakeSession]) -> None:
    session.error = RuntimeError("CUDA failure 209:\n  no kernel image is available")
    with pytest.raises(ProviderError, match="CUDA failure 209: no kernel image is available") as caught:
        select_provider("auto", "cuda")
    assert "\n" not in str(caught.value)


def test_cuda_that_computes_nonsense_is_refused(session: type[FakeSession]) -> None:
    session.factor = 2.0
    assert "wrong products" in (cuda_failure() or "")


def test_probe_model_runs() -> None:
    import onnxruntime

    a = np.array([[1, 2], [3, 4]], np.float32)
    session = onnxruntime.InferenceSession(PROBE_MODEL, providers=[CPU_PROVIDER])
    np.testing.assert_allclose(session.run(None, {"a": a, "b": a})[0], a @ a)


def test_probe_never_passes_by_running_on_the_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    # ONNX Runtime warns and goes on with the CPU when it does not know a provider. The probe must notice.
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER, CPU_PROVIDER])
    with pytest.warns(UserWarning, match="not in available"):
        assert cuda_failure() is not None


def test_missing_onnxruntime_is_said_when_a_bundle_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(MissingDependencyError, match=r"edge-spec\[cpu\]"):
        select_provider("auto", "cpu")
