"""Which ONNX Runtime execution provider a bundle runs on."""

from __future__ import annotations

import importlib.util
import platform

import numpy as np

from edge_spec.errors import ProviderError, RequestError
from edge_spec.onnx_runtime import import_onnxruntime

# What CUDA says where a library was not compiled for the GPU at hand.
_NO_CODE = ("no kernel image", "cudaerrornokernelimagefordevice", "invalid device function", "unsupported ptx")

DEVICES = ("auto", "cpu", "cuda")
CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"

# One node, y = MatMul(a, b), all of them float32 [2, 2]. Kept as bytes, because the runtime does not depend on onnx.
# The tests build it again and compare.
PROBE_MODEL = bytes.fromhex(
    "08083a590a110a01610a016212017922064d61744d756c120570726f62655a130a0161120e0a0c080112080a0208020a"
    "0208025a130a0162120e0a0c080112080a0208020a02080262130a0179120e0a0c080112080a0208020a02080242040a"
    "00100d"
)


def select_provider(device: str, bundle_device: str) -> list[str]:
    """Choose the execution providers of a session.

    A bundle's graphs are written for one kind of device (other types, other attention inputs), so the bundle decides
    and ``device`` can only agree: ``"auto"`` takes what the bundle is for.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``, as the caller asked.
        bundle_device: ``"cpu"`` or ``"cuda"``, the flavour the bundle was exported for.

    Returns:
        Provider names for ``onnxruntime.InferenceSession``, the one that does the work first.

    Raises:
        RequestError: ``device`` is none of the three.
        ProviderError: the bundle is for another device than the caller named, or CUDA does not run here.
        MissingDependencyError: ONNX Runtime is not installed.
    """
    if device not in DEVICES:
        raise RequestError(f"device is {device!r}; expected one of {', '.join(map(repr, DEVICES))}.")
    if device not in ("auto", bundle_device):
        raise ProviderError(
            f"device is {device!r}, but this bundle was exported for {bundle_device!r}. "
            f"Load it with device={bundle_device!r}, or export it again with --device {device}."
        )
    if bundle_device == "cpu":
        import_onnxruntime()
        return [CPU_PROVIDER]
    reason = cuda_failure()
    if reason is not None:
        advice = " ".join(filter(None, (reason, repair_advice(reason))))
        raise ProviderError(
            f"This bundle was exported for CUDA, which does not run here: {advice} Or export the bundle again with "
            "--device cpu."
        )
    return [CUDA_PROVIDER, CPU_PROVIDER]


def cuda_failure() -> str | None:
    """Run one matrix product on CUDA and say what went wrong, or ``None`` if it really ran there.

    That ONNX Runtime lists CUDA only means that it was built with it: the driver, the libraries or a kernel for this
    GPU may still be missing.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    onnxruntime = import_onnxruntime()
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return "the installed ONNX Runtime was built without CUDA; pip install 'edge-spec[gpu]' instead of [cpu]."
    if importlib.util.find_spec("nvidia") is not None and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # libraries that pip has installed are not on the loader's path
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # whatever goes wrong becomes the answer, not a log line
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    a = np.array([[1, 2], [3, 4]], np.float32)
    try:
        session = onnxruntime.InferenceSession(PROBE_MODEL, options, providers=[CUDA_PROVIDER])
        if session.get_providers()[0] != CUDA_PROVIDER:
            return "its provider cannot be loaded (driver or libraries missing?)."
        product = session.run(None, {"a": a, "b": a})[0]
    except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
        return f"a matrix product failed with: {' '.join(str(error).split())}"
    return None if np.allclose(product, a @ a) else "it computes wrong products."


def repair_advice(reason: str, machine: str | None = None) -> str:
    """What to do where CUDA does not run.

    Args:
        reason: what went wrong, as ONNX Runtime put it.
        machine: architecture of the processor; ``None`` for this one's.
    """
    machine = machine or platform.machine()
    lacks_code = any(sign in reason.lower() for sign in _NO_CODE)
    if machine == "aarch64":
        what = "has no code for this GPU" if lacks_code else "may be built for another GPU, CUDA or cuDNN"
        return (
            f"The installed onnxruntime-gpu {what}: the registry's for ARM is for servers. On a Jetson uninstall it "
            "and install the one for your JetPack from https://pypi.jetson-ai-lab.io (docs/jetson.md), or build it "
            "(docs/cuda.md)."
        )
    if lacks_code:
        return "The installed onnxruntime-gpu has no code for this GPU: upgrade it, or build it (docs/cuda.md)."
    if "without CUDA" in reason:  # which says what to do
        return ""
    return "Repair CUDA: the driver, the libraries of CUDA and cuDNN, and onnxruntime-gpu have to fit each other."
