"""Where the memory of the GPU is, how much there is, and how much of it is free.

An integrated GPU (Jetson) has none of its own: what the system tells holds for both. Of any other, the driver is asked:
libcuda which device CUDA would take, NVML what is free on it. Both come with the driver, and are called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.device_facts import board
from edge_spec.nvml import find_library, memory_teller, printable
from edge_spec.runtime.free_memory import available_memory, total_memory

_ROOT = Path("/")
_JETSON_RELEASE = "etc/nv_tegra_release"
_CUDA = "libcuda.so.1"

# CU_DEVICE_ATTRIBUTE_INTEGRATED: the GPU shares the memory of the machine.
_INTEGRATED = 18
_LONGEST_NAME = 256
# NVML tells of the whole card. Where CUDA sees a part of it (MIG), this share or more is missing.
_PART = 0.1


@dataclass(frozen=True)
class GpuMemory:
    """The memory that the first GPU computes in.

    Attributes:
        name: of the GPU or the board.
        unified: whether it is the machine's own.
        total: bytes there are; ``None``: nobody tells.
        free: tells the bytes that can be taken, ``None`` where nobody does.
    """

    name: str
    unified: bool
    total: int | None
    free: Callable[[], int | None]


def find_gpu(root: Path = _ROOT, load: Callable[[str], Any] = ctypes.CDLL) -> GpuMemory | None:
    """Return the memory of the GPU that CUDA takes first, or ``None`` if there is none.

    Args:
        root: where ``proc``, ``etc`` and ``sys`` lie.
        load: opens a library by its name; raises OSError if there is none.
    """
    if (jetson := _jetson(root)) is not None:
        return _shared(jetson, root)
    try:
        cuda = load(_CUDA)
        device = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            return None
        name, address = ctypes.create_string_buffer(_LONGEST_NAME), ctypes.create_string_buffer(_LONGEST_NAME)
        integrated, total = ctypes.c_int(), ctypes.c_size_t()
        if (
            cuda.cuDeviceGetName(name, _LONGEST_NAME, device)
            or cuda.cuDeviceGetAttribute(ctypes.byref(integrated), _INTEGRATED, device)
            or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
            or cuda.cuDeviceGetPCIBusId(address, _LONGEST_NAME, device)
        ):
            return None
    except (OSError, AttributeError):  # no such library, or one without such a function
        return None
    text = printable(name.value)
    if integrated.value:
        return _shared(text, root)
    nvml = _nvml_free(load, address.value, total.value)
    return GpuMemory(text, False, total.value, nvml or partial(_cuda_free, cuda, device))


def _shared(name: str, root: Path) -> GpuMemory:
    return GpuMemory(name, True, total_memory(root), partial(available_memory, root))


def _jetson(root: Path) -> str | None:
    """The name of the board, if it is a Jetson. The file of its release is not there in every container."""
    name = board(root) or ""
    if any(word in name for word in ("Jetson", "Tegra")):
        return name
    return (name or "Jetson") if (root / _JETSON_RELEASE).exists() else None


def _nvml_free(load: Callable[[str], Any], address: bytes, total: int) -> Callable[[], int | None] | None:
    """Tells what is free by NVML, which needs no context on the device; ``None`` where it cannot."""
    library = find_library(load)
    memory = None if library is None else memory_teller(library, address)
    first = None if memory is None else memory()
    if memory is None or first is None or total < (1 - _PART) * first.total:
        return None
    return lambda: None if (told := memory()) is None else told.free


def _cuda_free(cuda: Any, device: ctypes.c_int) -> int | None:
    """What is free by CUDA, in the context that ONNX Runtime takes as well; where there is none yet, one is made."""
    context, popped = ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        retain, release = cuda.cuDevicePrimaryCtxRetain, cuda.cuDevicePrimaryCtxRelease_v2
        push, pop, tell = cuda.cuCtxPushCurrent_v2, cuda.cuCtxPopCurrent_v2, cuda.cuMemGetInfo_v2
    except AttributeError:
        return None
    if retain(ctypes.byref(context), device):
        return None
    try:
        if push(context):
            return None
        failed = tell(ctypes.byref(free), ctypes.byref(total))
        pop(ctypes.byref(popped))
        return None if failed else free.value
    finally:
        release(device)
