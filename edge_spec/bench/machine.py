"""What a measurement ran on, and the memory it took. What cannot be found out is ``None``."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

from edge_spec import __version__
from edge_spec.onnx_runtime import import_onnxruntime


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions, ready for JSON."""
    cpu = _fields(Path("/proc/cpuinfo"))
    return {
        "processor": cpu.get("model name") or cpu.get("Model") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "physical_cores": _physical_cores(),
        "memory_bytes": _memory("MemTotal"),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "onnxruntime": import_onnxruntime().__version__,
        "edge_spec": __version__,
    }


def peak_memory_bytes() -> int:
    """Return the most memory this process has had resident so far, in bytes."""
    peak = _fields(Path("/proc/self/status")).get("VmHWM")
    if peak is not None:
        return int(peak.split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _memory(name: str) -> int | None:
    size = _fields(Path("/proc/meminfo")).get(name)
    return None if size is None else int(size.split()[0]) * 1024


def _physical_cores() -> int | None:
    """Count distinct (package, core) pairs, of which hyperthreads share one."""
    folders = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology")
    try:
        cores = {
            tuple((folder / name).read_text() for name in ("physical_package_id", "core_id")) for folder in folders
        }
    except OSError:
        return None
    return len(cores) or None


def _fields(file: Path) -> dict[str, str]:
    """Return the ``name: value`` lines of a file of the kernel's, the first of each name."""
    fields: dict[str, str] = {}
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields
