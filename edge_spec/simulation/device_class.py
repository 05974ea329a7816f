"""Classes of devices as published figures describe them, and what is assumed where those are silent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.simulation.model_sizes import ModelSizes

_FILE = Path(__file__).with_name("device_classes.json")


@dataclass(frozen=True)
class PublishedSpeed:
    """How fast somebody has found a model to decode on a device, one token at a time.

    Attributes:
        model: its name on the hub.
        sizes: of the model.
        tokens_per_second: as published.
        bits, head_bits: of a stored weight, scales included, and of one of the output projection.
        source: who says so.
    """

    model: str
    sizes: ModelSizes
    tokens_per_second: float
    bits: float
    head_bits: float
    source: str

    @property
    def bytes(self) -> float:
        """Bytes of weights that a token takes."""
        head = self.sizes.head_weights
        return ((self.sizes.weights - head) * self.bits + head * self.head_bits) / 8


@dataclass(frozen=True)
class DeviceClass:
    """A device with published figures.

    Attributes:
        name: by which it is asked for.
        title: for people.
        memory_bytes: all there is, for processor and GPU together.
        system_bytes: what the system keeps of them.
        bytes_per_second: peak of its memory.
        operations_per_second: peak of its dense float16 products.
        compute_share: the part of that which is reached.
        kernel_seconds, kernels_per_layer: what launching costs, and how often that is done.
        host_seconds, round_seconds: around every call, and around every round.
        memory_share: the part of the memory's peak that decoding reaches, where no figure of the very model is known.
        published: figures of models.
        cheap_row, dear_row: what each further row of a call costs at best and at worst, as a share of reading the
            weights once.
        sources, notes: where its figures come from, and how they were derived.
        assumptions: what else was taken for granted.
    """

    name: str
    title: str
    memory_bytes: int
    system_bytes: int
    bytes_per_second: float
    operations_per_second: float
    compute_share: float
    kernel_seconds: float
    kernels_per_layer: int
    host_seconds: float
    round_seconds: float
    memory_share: float
    published: tuple[PublishedSpeed, ...]
    cheap_row: float
    dear_row: float
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]

    def launching(self, sizes: ModelSizes) -> float:
        """Seconds of a call that do not depend on its rows: launches, and what the processor does around it."""
        return self.host_seconds + self.kernels_per_layer * sizes.layers * self.kernel_seconds

    def share_of(self, sizes: ModelSizes) -> float:
        """The part of the memory's peak that decoding a model reaches: by its published speed, if there is one."""
        own = next((speed for speed in self.published if speed.sizes == sizes), None)
        return self.memory_share if own is None else self._share(own)

    def published_speed(self, sizes: ModelSizes) -> PublishedSpeed | None:
        """The published figure of a model with these sizes, if there is one."""
        return next((speed for speed in self.published if speed.sizes == sizes), None)

    def _share(self, speed: PublishedSpeed) -> float:
        reading = 1.0 / speed.tokens_per_second - self.launching(speed.sizes)
        return speed.bytes / (reading * self.bytes_per_second)


def find_device(name: str) -> DeviceClass:
    """Return the class of devices of this name. Raises RequestError if there is none."""
    known = device_classes()
    if name not in known:
        raise RequestError(f"There is no device class {name!r}; expected one of {', '.join(known)}.")
    return known[name]


@lru_cache(maxsize=1)
def device_classes() -> Mapping[str, DeviceClass]:
    """Return all classes by name, the smallest first."""
    table = json.loads(_FILE.read_text("utf-8"))
    classes: dict[str, DeviceClass] = {}
    for name, facts in table["devices"].items():
        published = tuple(_speed(table, speed) for speed in facts["published"])
        device = _device(name, facts, table, published)
        shares = [device._share(speed) for speed in published]
        share = median(shares) if shares else classes[facts["as_effective_as"]].memory_share
        classes[name] = _device(name, facts, table, published, share)
    return classes


def _speed(table: Mapping[str, Any], facts: Mapping[str, Any]) -> PublishedSpeed:
    sizes = ModelSizes(*table["models"][facts["model"]])
    source = _source(table, facts["source"])
    speed, bits, head_bits = (facts[name] for name in ("tokens_per_second", "bits", "head_bits"))
    return PublishedSpeed(facts["model"], sizes, speed, bits, head_bits, source)


def _device(
    name: str,
    facts: Mapping[str, Any],
    table: Mapping[str, Any],
    published: tuple[PublishedSpeed, ...],
    memory_share: float = 1.0,
) -> DeviceClass:
    assumed, rows = table["assumed"], table["rows"]
    used = dict.fromkeys([*facts["sources"], *(speed["source"] for speed in facts["published"]), rows["source"]])
    return DeviceClass(
        name,
        facts["title"],
        int(facts["memory_gib"] * (1 << 30)),
        int(assumed["system_gib"]["value"] * (1 << 30)),
        facts["gb_per_second"] * 1e9,
        facts["fp16_tflops"] * 1e12,
        assumed["compute_share"]["value"],
        facts["kernel_microseconds"] * 1e-6,
        assumed["kernels_per_layer"]["value"],
        assumed["host_microseconds"]["value"] * 1e-6,
        assumed["round_microseconds"]["value"] * 1e-6,
        memory_share,
        published,
        rows["cheap"],
        rows["dear"],
        tuple(_source(table, source) for source in used),
        tuple(facts["notes"]),
        (f"cheap and dear rows ({rows['cheap']:g} and {rows['dear']:g}): {rows['why']}", *_assumptions(facts, assumed)),
    )


def _assumptions(facts: Mapping[str, Any], assumed: Mapping[str, Any]) -> Iterator[str]:
    for name, assumption in assumed.items():
        value = assumption.get("value", facts.get(name))
        yield f"{name}{'' if value is None else f' = {value:g}'}: {assumption['why']}"


def _source(table: Mapping[str, Any], name: str) -> str:
    source = table["sources"][name]
    return f"{source['title']}, {source['url']}"
