"""What this machine computes with and how fast it is set to run: board, power mode, clocks.

Everything is read where anybody may read it, and what cannot be found out is ``None``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_spec.nvml import Gpu, Library, find_library, read_gpus

_ROOT = Path("/")
_MOST_BYTES = 1 << 16

_BOARD = "proc/device-tree/model"
_GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
# Which mode of a Jetson is active, and what its modes are called.
_MODE = "var/lib/nvpmodel/status"
_MODES = "etc/nvpmodel.conf"
_ACTIVE = re.compile(r"pmode:(\d{1,9})")
_NAMED = re.compile(r"<\s*POWER_MODEL\s+ID=(\d{1,9})\s+NAME=(\S+?)\s*>")
# Clocks of a Jetson, in Hz. The memory's can be read by root alone.
_SCALED_DEVICES = "sys/class/devfreq"
_GPU_NAMES = ("gpu", "ga10b", "gv11b", "gp10b")
_MEMORY_CLOCK = "sys/kernel/debug/bpmp/debug/clk/emc/rate"
_MHZ = 1_000_000
_MOST_DIGITS = 15
# What is shown to people must not move their cursor.
_CONTROLS = dict.fromkeys((*range(9), *range(14, 32), *range(127, 160)))
# Processors whose clocks are read; more would take time and tell nothing new.
_MOST_CPUS = 16


@dataclass(frozen=True)
class DeviceFacts:
    """What there is to compute with, and how it is set.

    Attributes:
        board: what the device tree calls the board, such as a Jetson.
        power_mode: of a Jetson, by its name and number.
        governor: what decides on the processor's clock.
        driver: version of NVIDIA's driver.
        gpus: those that NVIDIA's management library knows.
        cpu_mhz: clock of the fastest processor core at the moment.
        gpu_mhz, memory_mhz: a Jetson's clocks at the moment.
    """

    board: str | None = None
    power_mode: str | None = None
    governor: str | None = None
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    cpu_mhz: int | None = None
    gpu_mhz: int | None = None
    memory_mhz: int | None = None


def read_device_facts(root: Path = _ROOT, find: Callable[[], Library | None] = find_library) -> DeviceFacts:
    """Find out all there is.

    Args:
        root: where ``proc``, ``sys``, ``etc`` and ``var`` lie.
        find: finds NVIDIA's management library.
    """
    known = read_gpus(find)
    return DeviceFacts(
        board(root),
        power_mode(root),
        governor(root),
        known.driver,
        known.gpus,
        _highest(_cpu_clocks(root), 1000),  # kHz
        _highest(_gpu_clocks(root), _MHZ),
        _highest([_content(root, _MEMORY_CLOCK)], _MHZ),
    )


def board(root: Path = _ROOT) -> str | None:
    """What the board calls itself; ``None`` on most machines that are no boards."""
    return _first_line(root, _BOARD)


def governor(root: Path = _ROOT) -> str | None:
    """What decides on the processor's clock."""
    return _first_line(root, _GOVERNOR)


def power_mode(root: Path = _ROOT) -> str | None:
    """The power mode of a Jetson, such as ``MAXN_SUPER (2)``; ``None`` elsewhere.

    Its name belongs to it, since another version of the system may call another mode by the same number.
    """
    status = _first_line(root, _MODE)
    found = None if status is None else _ACTIVE.search(status)
    if found is None:
        return status or None
    number = int(found[1])
    names = {int(other): name for other, name in _NAMED.findall(_content(root, _MODES) or "")}
    return f"{names[number]} ({number})" if number in names else str(number)


def _cpu_clocks(root: Path) -> Iterator[str | None]:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for index in list(usable)[:_MOST_CPUS]:
        clock = _content(root, f"sys/devices/system/cpu/cpu{index}/cpufreq/scaling_cur_freq")
        if clock is None:
            return  # so have the others none
        yield clock


def _gpu_clocks(root: Path) -> Iterator[str | None]:
    try:
        devices = [device.name for device in (root / _SCALED_DEVICES).iterdir()]
    except OSError:
        return
    for device in devices:
        if any(name in device for name in _GPU_NAMES):
            yield _content(root, f"{_SCALED_DEVICES}/{device}/cur_freq")


def _highest(clocks: Iterator[str | None] | list[str | None], unit: int) -> int | None:
    """The highest of clocks in MHz, of those that are numbers; ``None`` without any."""
    words = (clock.strip() for clock in clocks if clock is not None)
    known = [int(word) for word in words if word.isdecimal() and len(word) <= _MOST_DIGITS]
    return round(max(known) / unit) if known else None


def _first_line(root: Path, name: str) -> str | None:
    content = _content(root, name)
    if content is None:
        return None
    return (content.splitlines() or [""])[0].strip()


def _content(root: Path, name: str) -> str | None:
    """What a small file of the system says; ``None`` where there is none to read."""
    try:
        with open(f"{root}/{name}", "rb") as opened:  # noqa: PTH123 - four times as fast as Path.open
            content = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return content.translate(_CONTROLS)
