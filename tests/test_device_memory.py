"""Where a GPU's memory is and what is free in it, by drivers that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.runtime.device_memory import find_gpu

GIB = 1 << 30
ADDRESS = b"0000:65:00.0"


class FakeCuda:
    """libcuda with one device; functions return 0, or the code that ``failing`` gives them."""

    def __init__(self, integrated: bool = False, total: int = 24 * GIB, **failing: int) -> None:
        self.integrated, self.total, self.failing = integrated, total, failing
        self.contexts = 0  # retained and not released
        self.pushed = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        answer = {
            "cuDeviceGet": lambda device, ordinal: setattr(device._obj, "value", ordinal),
            "cuDeviceGetName": lambda buffer, length, device: setattr(buffer, "value", b"NVIDIA Fake"),
            "cuDeviceGetAttribute": self._attribute,
            "cuDeviceTotalMem_v2": lambda total, device: setattr(total._obj, "value", self.total),
            "cuDeviceGetPCIBusId": lambda buffer, length, device: setattr(buffer, "value", ADDRESS),
            "cuDevicePrimaryCtxRetain": lambda context, device: self._count("contexts", 1),
            "cuDevicePrimaryCtxRelease_v2": lambda device: self._count("contexts", -1),
            "cuCtxPushCurrent_v2": lambda context: self._count("pushed", 1),
            "cuCtxPopCurrent_v2": lambda context: self._count("pushed", -1),
            "cuMemGetInfo_v2": self._free,
        }.get(name, lambda *arguments: None)

        def call(*arguments: Any) -> int:
            if name not in self.failing:
                answer(*arguments)
            return self.failing.get(name, 0)

        return call

    def _attribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = int(self.integrated) if attribute == 18 else 99

    def _free(self, free: Any, total: Any) -> None:
        assert self.contexts == self.pushed == 1
        free._obj.value, total._obj.value = 5 * GIB, self.total

    def _count(self, what: str, by: int) -> None:
        setattr(self, what, getattr(self, what) + by)


class FakeNvml:
    """libnvidia-ml that knows one card."""

    def __init__(self, total: int = 24 * GIB, memory_code: int = 0) -> None:
        self.total, self.memory_code = total, memory_code
        self.free = 20 * GIB

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return 0 if address == ADDRESS else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        assert handle.value == 7
        memory._obj.total, memory._obj.free, memory._obj.used = self.total, self.free, self.total - self.free
        return self.memory_code


def loads(**libraries: Any) -> Callable[[str], Any]:
    """Opens these libraries, by the beginning of their names."""

    def load(name: str) -> Any:
        for beginning, library in libraries.items():
            if name.startswith(beginning):
                return library
        raise OSError(f"{name}: cannot open shared object file")

    return load


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 8 GiB, 6 of them free."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * GIB >> 10} kB\nMemAvailable: {6 * GIB >> 10} kB\n")
    return tmp_path


def test_without_a_driver_there_is_no_gpu(root: Path) -> None:
    assert find_gpu(root, loads()) is None


def test_a_card_has_memory_of_its_own_of_which_nvml_tells_what_is_free(root: Path) -> None:
    nvml = FakeNvml()
    gpu = find_gpu(root, loads(libcuda=FakeCuda(), libnvidia=nvml))
    assert gpu is not None
    assert (gpu.name, gpu.unified, gpu.total) == ("NVIDIA Fake", False, 24 * GIB)
    assert gpu.free() == 20 * GIB
    nvml.free = 3 * GIB
    assert gpu.free() == 3 * GIB


@pytest.mark.parametrize(
    "nvml", [None, FakeNvml(memory_code=3), FakeNvml(total=140 * GIB), object()], ids=["none", "mute", "MIG", "old"]
)
def test_where_nvml_does_not_tell_of_what_cuda_sees_cuda_is_asked_in_a_context_that_is_released(
    root: Path, nvml: Any
) -> None:
    cuda = FakeCuda()
    gpu = find_gpu(root, loads(libcuda=cuda, **({} if nvml is None else {"libnvidia": nvml})))
    assert gpu is not None
    assert gpu.free() == 5 * GIB
    assert cuda.contexts == cuda.pushed == 0


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"])
def test_what_cuda_does_not_tell_either_is_not_known(root: Path, function: str) -> None:
    cuda = FakeCuda(**{function: 2})
    gpu = find_gpu(root, loads(libcuda=cuda))
    assert gpu is not None
    assert gpu.free() is None
    assert cuda.contexts == cuda.pushed == 0


def test_an_integrated_gpu_has_the_machines_memory(root: Path) -> None:
    gpu = find_gpu(root, loads(libcuda=FakeCuda(integrated=True), libnvidia=FakeNvml()))
    assert gpu is not None
    assert gpu.unified
    assert (gpu.total, gpu.free()) == (8 * GIB, 6 * GIB)


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("proc/device-tree/model", "NVIDIA Jetson Orin Nano Developer Kit\0", "NVIDIA Jetson Orin Nano Developer Kit"),
        ("etc/nv_tegra_release", "# R36 (release), REVISION: 4.3", "Jetson"),
    ],
)
def test_a_jetson_is_known_by_its_board_even_without_a_driver(root: Path, file: str, content: str, name: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(content)
    gpu = find_gpu(root, loads())
    assert gpu is not None
    assert (gpu.name, gpu.unified, gpu.total, gpu.free()) == (name, True, 8 * GIB, 6 * GIB)


def test_another_board_is_no_gpu(root: Path) -> None:
    (root / "proc/device-tree").mkdir()
    (root / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B Rev 1.0\0")
    assert find_gpu(root, loads()) is None


@pytest.mark.parametrize(
    "function",
    ["cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceTotalMem_v2", "cuDeviceGetPCIBusId"],
)
def test_a_driver_that_fails_is_none(root: Path, function: str) -> None:
    assert find_gpu(root, loads(libcuda=FakeCuda(**{function: 100}), libnvidia=FakeNvml())) is None


def test_a_library_without_the_functions_is_none(root: Path) -> None:
    assert find_gpu(root, loads(libcuda=object())) is None


class Lacking:
    """A library without one of its functions, or one that goes away once it was asked."""

    def __init__(self, library: Any, function: str) -> None:
        self._library, self._function = library, function

    def __getattr__(self, name: str) -> Any:
        if name == self._function:
            raise AttributeError(name)
        return getattr(self._library, name)


@pytest.mark.parametrize(
    "function",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemGetInfo_v2",
        "cuCtxPopCurrent_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ],
)
def test_what_a_driver_lacks_to_tell_what_is_free_is_not_known(root: Path, function: str) -> None:
    gpu = find_gpu(root, loads(libcuda=Lacking(FakeCuda(), function)))
    assert gpu is not None and gpu.free() is None


def test_an_nvml_that_knows_no_memory_leaves_it_to_cuda(root: Path) -> None:
    cuda = FakeCuda()
    nvml = Lacking(FakeNvml(), "nvmlDeviceGetMemoryInfo")
    gpu = find_gpu(root, loads(libcuda=cuda, libnvidia=nvml))
    assert gpu is not None and gpu.free() == find_gpu(root, loads(libcuda=cuda)).free()  # type: ignore[union-attr]
