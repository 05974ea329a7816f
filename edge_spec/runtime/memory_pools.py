"""The pools of memory that a bundle is loaded into, and what is free in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_spec.manifest import Manifest
from edge_spec.runtime.device_memory import GpuMemory, find_gpu
from edge_spec.runtime.free_memory import available_memory, total_memory
from edge_spec.runtime.memory_budget import MemoryBudget, budget_bytes
from edge_spec.runtime.memory_plan import Pools

Free = Callable[[], int | None]


@dataclass(frozen=True)
class MemoryPools:
    """What there is, for one bundle.

    Attributes:
        kind: what computes, and whose memory it computes in.
        gpu: name of the GPU; ``None`` for the CPU, or where none was found.
        total: bytes of the pool that holds the target; ``None``: nobody tells.
        free: tells the bytes of it that can be taken; ``None`` where nobody does.
        host_free: the same of the host, beside a GPU with memory of its own; ``None`` where there is one pool.
    """

    kind: Pools
    gpu: str | None
    total: int | None
    free: Free
    host_free: Free | None = None

    def budgets(self, budget: MemoryBudget, name: str = "memory_budget") -> tuple[int | None, int | None]:
        """Return a budget in bytes, as :func:`budget_bytes`, and what the host may give beside it."""
        host = None if self.host_free is None else budget_bytes(None, self.host_free())
        return budget_bytes(budget, self.free(), name), host

    def device_taken(self) -> int | None:
        """Bytes that are taken of a GPU's own memory; ``None`` where there is none, or nobody tells."""
        if self.kind != "discrete" or self.total is None or (free := self.free()) is None:
            return None
        return self.total - free


def pools_here(
    manifest: Manifest, available: Free = available_memory, find: Callable[[], GpuMemory | None] = find_gpu
) -> MemoryPools:
    """What a bundle finds on this machine.

    Args:
        manifest: of the bundle.
        available: tells the bytes that are free in the machine's memory.
        find: finds the GPU; asked only for a bundle that is for one.
    """
    if manifest.device == "cpu":
        return MemoryPools("cpu", None, total_memory(), available)
    gpu = find()
    if gpu is None or gpu.unified:
        return MemoryPools("unified", None if gpu is None else gpu.name, total_memory(), available)
    return MemoryPools("discrete", gpu.name, gpu.total, gpu.free, available)


def pools_elsewhere(kind: Pools) -> MemoryPools:
    """Those of another machine, of which nothing is known but their kind."""
    return MemoryPools(kind, None, None, _unknown, _unknown if kind == "discrete" else None)


def _unknown() -> int | None:
    return None
