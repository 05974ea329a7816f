"""Made-up machines: files as a Jetson's system has them, and an NVML that says what a test wants to hear."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NVPMODEL = """
# FORMAT:
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
CPU_ONLINE CORE_0 1
"""


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below ``root`` and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return root


def jetson(root: Path, mode: int = 2, gpu_hz: int = 1_020_000_000) -> Path:
    """A Jetson Orin Nano with JetPack 6, as far as anybody may read it."""
    return write_tree(
        root,
        {
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
            "var/lib/nvpmodel/status": f"pmode:{mode:04d} fmode:quiet\n",
            "etc/nvpmodel.conf": NVPMODEL,
            "sys/class/devfreq/17000000.gpu/cur_freq": f"{gpu_hz}\n",
            "sys/class/devfreq/15340000.vic/cur_freq": "2000000000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1728000\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "729600\n",
            "sys/kernel/debug/bpmp/debug/clk/emc/rate": "3199000000\n",
        },
    )


class FakeNvml:
    """As much of NVML as is asked for; each value is what a function gives, and one that is absent is not there.

    A ``None`` is a function that says that this GPU does not support it.
    """

    def __init__(self, gpus: list[dict[str, Any]], driver: str | None = "550.54.15", begins: bool = True) -> None:
        self.gpus, self.driver, self.begins = gpus, driver, begins
        self.begun = self.ended = 0

    def nvmlInit_v2(self) -> int:
        self.begun += self.begins
        return 0 if self.begins else 9  # driver not loaded

    def nvmlShutdown(self) -> int:
        self.ended += 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        return self._tell(self.driver, text)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return self._tell(len(self.gpus), count)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._tell(index.value + 1, handle)

    def __getattr__(self, name: str) -> Any:
        functions = {
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetPowerManagementLimit": "milliwatts",
            "nvmlDeviceGetClockInfo": "clocks",
            "nvmlDeviceGetTemperature": "celsius",
            "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
        }
        if name not in functions or all(functions[name] not in gpu for gpu in self.gpus):
            raise AttributeError(name)

        def function(handle: Any, *arguments: Any) -> int:
            value = self.gpus[handle.value - 1].get(functions[name])
            if name == "nvmlDeviceGetName":
                return self._tell(value, arguments[0])
            if name == "nvmlDeviceGetClockInfo" and value is not None:
                value = value[arguments[0].value]
            return self._tell(value, arguments[-1])

        return function

    @staticmethod
    def _tell(value: Any, place: Any) -> int:
        if value is None:
            return 3  # not supported
        if isinstance(value, str):
            place.value = value.encode()
        else:
            place._obj.value = value
        return 0


H200 = {
    "name": "NVIDIA H200",
    "milliwatts": 700_000,
    "clocks": {1: 1980, 2: 3201},
    "celsius": 41,
    "reasons": 0x0,
}
