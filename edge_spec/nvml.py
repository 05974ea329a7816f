"""What NVIDIA's management library tells of the GPUs. Where it or a GPU is missing, that is nothing, at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

# The library itself, or whatever has its functions.
Library: TypeAlias = Any

_NAME = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEXT_BYTES = 96
_MOST_GPUS = 64
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_TEMPERATURE_OF_GPU = 0

# Bits of the reasons for clocks below their maximum. An idle GPU, and clocks that somebody has asked for, are none that
# a measurement has to fear.
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU, as far as the library tells.

    Attributes:
        name: as its maker calls it.
        power_limit_watts: what it may take at most, as somebody has set it.
        sm_mhz, memory_mhz: its clocks at the moment.
        celsius: how warm it is.
        throttled_by: what holds its clocks down at the moment.
    """

    name: str | None = None
    power_limit_watts: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    celsius: int | None = None
    throttled_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """The driver's version, and the GPUs in the order of their places on the bus."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class CardMemory:
    """Bytes of a GPU's own memory: all there are, and those that are free."""

    total: int
    free: int


class _Memory(ctypes.Structure):
    """The library's own record of that (nvmlMemory_t)."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def find_library(load: Callable[[str], Library] = ctypes.CDLL) -> Library | None:
    """Load the library; ``None`` where there is no driver.

    Args:
        load: opens a library by its name; raises OSError if there is none.
    """
    try:
        return load(_NAME)
    except OSError:
        return None


def read_gpus(find: Callable[[], Library | None] = find_library) -> Gpus:
    """Ask for all GPUs. What cannot be found out is ``None``; nothing is ever raised.

    Args:
        find: finds the library.
    """
    library = find()
    if library is None:
        return Gpus()
    with _begun(library) as ready:
        if not ready:
            return Gpus()
        count = min(_number(library, "nvmlDeviceGetCount_v2") or 0, _MOST_GPUS)
        gpus = (_read(library, index) for index in range(count))
        return Gpus(_text(library, "nvmlSystemGetDriverVersion"), tuple(gpu for gpu in gpus if gpu is not None))


def memory_teller(library: Library, address: bytes) -> Callable[[], CardMemory | None] | None:
    """What tells the memory of a GPU, as often as it is asked and without a context on the device.

    Args:
        library: stays in use for as long as the process lives.
        address: of the GPU on the PCI bus, as CUDA tells it.

    Returns:
        A function, which gives ``None`` when the library does not tell; ``None`` if it does not know the GPU.
    """
    handle = ctypes.c_void_p()
    if not _call(library, "nvmlInit_v2"):
        return None
    if not _call(library, "nvmlDeviceGetHandleByPciBusId_v2", address, ctypes.byref(handle)):
        return None

    def memory() -> CardMemory | None:
        told = _Memory()
        known = _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(told))
        return CardMemory(int(told.total), int(told.free)) if known else None

    return memory


@contextmanager
def _begun(library: Library) -> Iterator[bool]:
    ready = _call(library, "nvmlInit_v2")
    try:
        yield ready
    finally:
        if ready:
            _call(library, "nvmlShutdown")


def _read(library: Library, index: int) -> Gpu | None:
    handle = ctypes.c_void_p()
    if not _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
        return None
    limit = _number(library, "nvmlDeviceGetPowerManagementLimit", handle)  # milliwatts
    reasons = _number(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong) or 0
    return Gpu(
        _text(library, "nvmlDeviceGetName", handle),
        None if limit is None else round(limit / 1000),
        _number(library, "nvmlDeviceGetClockInfo", handle, ctypes.c_int(_SM_CLOCK)),
        _number(library, "nvmlDeviceGetClockInfo", handle, ctypes.c_int(_MEMORY_CLOCK)),
        _number(library, "nvmlDeviceGetTemperature", handle, ctypes.c_int(_TEMPERATURE_OF_GPU)),
        tuple(name for bit, name in _THROTTLES.items() if reasons & bit),
    )


def _number(library: Library, function: str, *arguments: Any, kind: type[Any] = ctypes.c_uint) -> int | None:
    value = kind()
    return int(value.value) if _call(library, function, *arguments, ctypes.byref(value)) else None


def _text(library: Library, function: str, *arguments: Any) -> str | None:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if not _call(library, function, *arguments, text, ctypes.c_uint(_TEXT_BYTES)):
        return None
    return printable(text.value) or None


def printable(text: bytes) -> str:
    """What a driver calls something, without characters that would move the cursor of a terminal."""
    return "".join(character for character in text.decode("utf-8", "replace") if character.isprintable())


def _call(library: Library, function: str, *arguments: Any) -> bool:
    """Whether a function is there and succeeds: Jetsons have a library that lacks half of them."""
    try:
        return bool(getattr(library, function)(*arguments) == _SUCCESS)
    except AttributeError:
        return False
