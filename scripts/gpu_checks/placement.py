"""What lies and runs where: features, nodes that copy, weights that are held once, and the plan of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from edge_spec.bench.conditions import describe
from edge_spec.device_facts import read_device_facts
from edge_spec.runtime.cuda_features import CudaFeatures
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.memory_pools import MemoryPools
from edge_spec.runtime.model import Model
from edge_spec.runtime.profile_nodes import read_profile
from gpu_checks.check import Finding

Open = Callable[[DeviceSettings], Model]

_MIB = 1 << 20
# What a plan may be off by.
_LEAST, _MOST = 0.7, 1.0


def check_features(features: CudaFeatures) -> Iterator[Finding]:
    """What the probes say, one line each."""
    yield Finding("device", describe(read_device_facts()) or "nothing tells")
    for field in fields(features):
        value = getattr(features, field.name)
        if field.name in ("lending", "int4_rows_cost"):
            yield Finding(f"probe: {field.name}", f"{value:.2f}" if isinstance(value, float) else str(value))
        else:
            yield Finding.judged(f"probe: {field.name}", value or "works", "works", value is None)


def check_nodes(open_model: Open, settings: DeviceSettings, folder: Path, provider: str) -> Iterator[Finding]:
    """Profile calls for chains, trees and drafting, and list what did not run on the device."""
    model = open_model(replace(settings, captures=False, profile=str(folder / "profile")))
    model.forward([1, 2, 3], range(3))
    if model.takes_trees:
        model.forward([1, 2, 3], range(3), [3, 4, 4], None)
    for steps in model.chain_lengths:
        model.draft([1], steps)
    for number, file in enumerate(model.end_profiles()):
        nodes = read_profile(file, provider)
        details = {"providers": nodes.providers, "elsewhere": nodes.elsewhere, "copies": list(nodes.copies)}
        found = (
            f"{sum(nodes.providers.values())} nodes, {len(nodes.copies)} copies, elsewhere {nodes.elsewhere or 'none'}"
        )
        yield Finding.judged(f"nodes of graph {number}", found, "no copies", not nodes.copies, details)


def check_sharing(open_model: Open, settings: DeviceSettings, pools: MemoryPools, weights: int) -> Iterator[Finding]:
    """What the device's memory loses to a graph for chains alone, and to one for trees beside it."""
    if pools.device_taken() is None:
        yield Finding("weights held once", "nothing tells what the device has taken", verdict="not run")
        return
    taken = {}
    for trees in (False, True):
        before = pools.device_taken() or 0
        model = open_model(replace(settings, captures=False, tree_graph=trees))
        taken[trees] = (pools.device_taken() or 0) - before
        del model
    more = taken[True] - taken[False]
    yield Finding.judged(
        "weights held once",
        f"chains {taken[False] / _MIB:.0f} MiB, the graph for trees {more / _MIB:.0f} MiB more",
        f"less than half of the weights, {weights / _MIB:.0f} MiB",
        2 * more < weights,
        taken,
    )


def check_plan(load: Callable[[], Engine], pools: MemoryPools) -> Iterator[Finding]:
    """What an engine takes of the device, against its plan."""
    before = pools.device_taken()
    engine = load()
    planned = engine.plan.total_bytes
    with engine:
        engine.generate("The railway reached the valley. " * 60, max_new_tokens=200)
        after = pools.device_taken()
    if before is None or after is None:
        yield Finding("memory against the plan", "nothing tells what the device has taken", verdict="not run")
        return
    share = (after - before) / planned
    yield Finding.judged(
        "memory against the plan",
        f"{(after - before) / _MIB:.0f} of {planned / _MIB:.0f} MiB, {share:.0%}",
        f"{_LEAST:.0%} to {_MOST:.0%}",
        _LEAST <= share <= _MOST,
    )
