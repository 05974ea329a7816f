"""How the machine was set while it was measured, and what of that changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edge_spec.device_facts import DeviceFacts
from edge_spec.nvml import Gpu

# A clock that has lost more than this share is worth a word; smaller steps are a governor's daily business.
_NOTICEABLE = 0.1


@dataclass(frozen=True)
class Conditions:
    """What the machine said of itself at three moments.

    Attributes:
        before: before anything was loaded, when clocks may still rest.
        begun: after the first answers, when they do not.
        after: when the last answer was there.
    """

    before: DeviceFacts
    begun: DeviceFacts
    after: DeviceFacts

    def warnings(self) -> list[str]:
        """Say what makes the figures doubtful: another power mode, or clocks that fell under the load."""
        return [*self._settings(), *self._clocks(), *self._throttling()]

    def _settings(self) -> Iterator[str]:
        before, after = self.before, self.after
        pairs = [("power mode", before.power_mode, after.power_mode), ("governor", before.governor, after.governor)]
        pairs += [
            (f"power limit of {gpu.name}", _watts(gpu), _watts(then))
            for gpu, then in zip(before.gpus, after.gpus, strict=False)
        ]
        for name, had, has in pairs:
            if had != has:
                yield (
                    f"The {name} changed from {had} to {has} while this was measured. Costs were measured as the pair "
                    "was loaded, so measure again; the next load will."
                )

    def _clocks(self) -> Iterator[str]:
        then, now = _clocks(self.begun), _clocks(self.after)
        for name, mhz in then.items():
            if name in now and now[name] < (1.0 - _NOTICEABLE) * mhz:
                yield f"The {name} clock fell from {mhz} to {now[name]} MHz while this was measured."

    def _throttling(self) -> Iterator[str]:
        for gpu in self.after.gpus:
            if gpu.throttled_by:
                yield f"At the end, the clocks of {gpu.name} were held down by {' and '.join(gpu.throttled_by)}."


def describe(facts: DeviceFacts) -> str:
    """Name the device and how it is set, in one line; empty where nothing is known."""
    return "; ".join([*_parts(facts), *map(_gpu, facts.gpus)])


def _parts(facts: DeviceFacts) -> Iterator[str]:
    if facts.board is not None:
        yield facts.board
    if facts.power_mode is not None:
        yield f"power mode {facts.power_mode}"
    if facts.governor is not None:
        yield f"governor {facts.governor}"
    clocks = {"CPU": facts.cpu_mhz, "GPU": facts.gpu_mhz, "memory": facts.memory_mhz}
    yield from (f"{name} {mhz} MHz" for name, mhz in clocks.items() if mhz is not None)
    if facts.driver is not None:
        yield f"driver {facts.driver}"


def _gpu(gpu: Gpu) -> str:
    known = {"at most {} W": gpu.power_limit_watts, "SM {} MHz": gpu.sm_mhz, "memory {} MHz": gpu.memory_mhz}
    known["{} °C"] = gpu.celsius
    parts = [text.format(value) for text, value in known.items() if value is not None]
    if gpu.throttled_by:
        parts.append(f"held down by {' and '.join(gpu.throttled_by)}")
    name = gpu.name or "a GPU without a name"
    return f"{name} ({', '.join(parts)})" if parts else name


def _clocks(facts: DeviceFacts) -> Mapping[str, int]:
    """All clocks that are known, in MHz, by what they belong to."""
    clocks = {"CPU": facts.cpu_mhz, "GPU": facts.gpu_mhz, "memory": facts.memory_mhz}
    for index, gpu in enumerate(facts.gpus):
        clocks[f"SM (GPU {index})"], clocks[f"memory (GPU {index})"] = gpu.sm_mhz, gpu.memory_mhz
    return {name: mhz for name, mhz in clocks.items() if mhz is not None}


def _watts(gpu: Gpu) -> str:
    return "an unknown one" if gpu.power_limit_watts is None else f"{gpu.power_limit_watts} W"
