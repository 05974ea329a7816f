"""Watches every pool of memory that an engine is loaded into, each with what lies in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge_spec.runtime.free_memory import total_memory
from edge_spec.runtime.memory_law import Place
from edge_spec.runtime.memory_plan import MemoryPlan
from edge_spec.runtime.memory_pools import MemoryPools
from edge_spec.runtime.pressure import MemoryEvent, MemoryPressure, Sheddable, usual_reserve


class PoolPressure:
    """The watches of all pools, as one."""

    def __init__(self, watches: Sequence[MemoryPressure]) -> None:
        """Watch by all of these."""
        self._watches = watches

    def check(self, position: int, remaining: int) -> list[MemoryEvent]:
        """Look at every pool and act, as :meth:`MemoryPressure.check`."""
        return [event for watch in self._watches for event in watch.check(position, remaining)]


def usual_reserves(pools: MemoryPools, plan: MemoryPlan, resident: int) -> dict[Place, int]:
    """Bytes that should stay free in each pool; where there is one only, that is the host's.

    Args:
        pools: what there is, before anything is loaded.
        plan: what will be.
        resident: bytes that the process has on the host already.
    """

    def left(free: int | None, to_come: int) -> int | None:
        return None if free is None else free - to_come

    if pools.host_free is None:
        return {"host": usual_reserve(pools.total, left(pools.free(), plan.total_bytes - resident))}
    return {
        "host": usual_reserve(total_memory(), left(pools.host_free(), plan.host_bytes - resident)),
        "device": usual_reserve(pools.total, left(pools.free(), plan.total_bytes)),
    }


def watch_pools(
    parts: Sequence[Sheddable],
    pools: MemoryPools,
    reserves: Mapping[Place, int],
    give_back: Callable[[], None],
    clock: Callable[[], float],
) -> PoolPressure:
    """Watch pools.

    Args:
        parts: what can be given up, in this order within each pool.
        pools: tell what is free.
        reserves: bytes that should stay free, by :func:`usual_reserves`.
        give_back: called after something was given up, to hand freed memory to the system.
        clock: tells the time, in seconds.
    """
    if pools.host_free is None:
        return PoolPressure([MemoryPressure(parts, pools.free, reserves["host"], give_back, clock)])
    free = {"device": pools.free, "host": pools.host_free}
    return PoolPressure(
        [
            MemoryPressure([part for part in parts if part.place == place], free[place], reserve, give_back, clock)
            for place, reserve in reserves.items()
        ]
    )
