"""The memory plan: the best configuration whose predicted peak stays within a budget, before anything is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.manifest import CacheType, Device, Manifest
from edge_spec.runtime.calibration_cache import KeptCalibration
from edge_spec.runtime.configuration import WIDEST, Configuration, DrafterChoice
from edge_spec.runtime.drafter_outlook import Costly, Outlook, outlook
from edge_spec.runtime.memory_law import MemoryItem, memory_items
from edge_spec.runtime.memory_plan import GivenUp, MemoryPlan, NextLarger, Pools, within
from edge_spec.runtime.memory_profile import MemoryProfile

# Tokens of context where the caller does not say: the cache of a long one would not fit a small device.
DEFAULT_CONTEXT = 4096
# Texts of a whole context that can be kept at once; shorter ones are more.
DEFAULT_CONVERSATIONS = 1

# Beyond this, a number is a slip of the hand.
MOST_CONVERSATIONS = 1_000_000

_CONTEXTS = (3072, 2048, 1536, 1024, 768, 512, 384, 256)
_WIDTHS = (WIDEST, 31, 15, 7)
_WINDOWS = (2048, 1024, 512, 256)

# What can be given up, the most valuable first, and so given up last. Everything but the target's keys and values in
# int8 leaves the text as it is, and a shorter context leaves what fits it. A draft's place on the GPU is not given up
# by steps that each take less memory: what it leaves there it takes on the host. Nor is one drafter for another, which
# may take more.
_ORDER = ("context", "target_kv", "draft", "draft_device", "draft_kv", "draft_window", "widest", "conversations")
_DEVICE = _ORDER.index("draft_device")


def plan_memory(
    manifest: Manifest,
    budget: int | None,
    context: int | None = None,
    conversations: int = DEFAULT_CONVERSATIONS,
    kv_types: Mapping[str, Sequence[CacheType]] | None = None,
    profile: MemoryProfile | None = None,
    pools: Pools | None = None,
    host_budget: int | None = None,
    drafter: DrafterChoice = "auto",
    kept: Sequence[KeptCalibration] = (),
) -> MemoryPlan:
    """Find the best configuration within a budget.

    Args:
        manifest: what the bundle says of itself.
        budget: bytes of the whole process at its peak, or, beside a GPU with memory of its own, of what lies there;
            ``None``: no limit.
        context: tokens of context that are insisted on; ``None``: 4096 or the model's limit, less if need be.
        conversations: wished number of texts of a whole context that can be kept at once.
        kv_types: for ``"target"``, ``"draft"`` and ``"cpu_draft"``, how their graphs can store keys and values, the
            best first; ``None``: in their own type only.
        profile: what an earlier load measured here.
        pools: what a bundle for CUDA is planned for; ``None``: a GPU that shares the machine's memory.
        host_budget: most bytes on the host, beside a GPU with memory of its own; ``None``: no limit.
        drafter: ``"head"`` and ``"model"`` insist on one of the bundle's drafters, ``"none"`` does without; ``"auto"``
            takes the one that gains more for each byte if it fits, else the other.
        kept: calibrations of this bundle that earlier loads have kept here, the latest first.

    Returns:
        The plan; where nothing fits, that of the smallest configuration.

    Raises:
        RequestError: an argument is out of range, or the bundle has no such drafter.
    """
    pools = "cpu" if manifest.device == "cpu" else pools or "unified"
    host_budget = host_budget if pools == "discrete" else None
    has = drafters_of(manifest)
    if drafter not in (*has, "auto", "none"):
        raise RequestError(_missing_drafter(drafter, has))

    def planner(drafters: Sequence[Costly | None]) -> _Planner:
        levels = _levels(manifest, context, conversations, kv_types, drafters)
        return _Planner(manifest, levels, profile, pools, host_budget)

    outlooks: tuple[Outlook, ...] = ()
    if manifest.head is not None:
        sizes = ((name, planner([name, None]).drafter_bytes()) for name in has)
        # A stable order: the draft model stays where the head gains no more.
        found = (outlook(name, manifest, size, kept) for name, size in sizes)
        outlooks = tuple(sorted(found, key=lambda one: one.worth, reverse=True))
        has = [one.drafter for one in outlooks]
    wanted: dict[DrafterChoice, Sequence[Costly | None]] = {"auto": [*has, None], "none": [None]}
    plan = planner(wanted.get(drafter, [name for name in has if name == drafter])).plan(budget)
    return replace(plan, outlooks=outlooks)


def drafters_of(manifest: Manifest) -> list[Costly]:
    """The drafters with networks of their own that a bundle has."""
    has: dict[Costly, bool] = {"model": bool(manifest.drafts), "head": manifest.head is not None}
    return [name for name, there in has.items() if there]


def _missing_drafter(drafter: str, has: Sequence[Costly]) -> str:
    known = " or ".join(repr(name) for name in ("auto", *has, "none"))
    hints = {"head": " This bundle has no head.", "model": " This bundle has no draft model."}
    return f"drafter is {drafter!r}, expected {known}.{hints.get(drafter, '')}"


def _levels(
    manifest: Manifest,
    context: int | None,
    conversations: int,
    kv_types: Mapping[str, Sequence[CacheType]] | None,
    drafters: Sequence[Costly | None],
) -> dict[Device, dict[str, Sequence[Any]]]:
    """The values each part of a configuration can have, what is wished first, by what the draft runs on."""
    limit = manifest.context_length
    if context is not None and not 2 <= context <= limit:
        raise RequestError(f"context is {context}, expected 2 to {limit}, the limit of this bundle's target.")
    if not 1 <= conversations <= MOST_CONVERSATIONS:
        raise RequestError(f"conversations is {conversations}, expected 1 to {MOST_CONVERSATIONS:,}.")
    wished = min(DEFAULT_CONTEXT, limit) if context is None else context
    devices: tuple[Device, ...] = tuple(manifest.drafts) or (manifest.device,)

    def types(name: str, device: Device) -> Sequence[CacheType]:
        own: CacheType = "float32" if device == "cpu" else "float16"
        return tuple((kv_types or {}).get(name, (own,)))

    def levels(device: Device) -> dict[str, Sequence[Any]]:
        return {
            "context": (wished, *(() if context is not None else (size for size in _CONTEXTS if size < wished))),
            "target_kv": types("target", manifest.device),
            "draft": drafters,
            "draft_device": devices,
            "draft_kv": types("draft" if device == manifest.device else "cpu_draft", device),
            "draft_window": (wished, *(size for size in _WINDOWS if size < wished)),
            "widest": _WIDTHS,
            "conversations": range(conversations, 0, -1),
        }

    return {device: levels(device) for device in devices}


class _Planner:
    """Searches the levels, for each device that the draft can run on.

    Every other step down takes less memory of each kind, so it suffices to decide one part after the other. Which
    drafter is loaded is part ``"draft"``, whose levels are names.
    """

    def __init__(
        self,
        manifest: Manifest,
        levels: Mapping[Device, Mapping[str, Sequence[Any]]],
        profile: MemoryProfile | None,
        pools: Pools,
        host_budget: int | None,
    ) -> None:
        self._manifest = manifest
        self._levels = list(levels.values())
        self._profile = profile
        self._pools = pools
        self._host_budget = host_budget

    def drafter_bytes(self) -> int:
        """What the drafter wished for takes beside the target, in all pools, where one text has all that is wished.

        What loading takes for a moment is left out: there may be room for it, and then it hides what stays.
        """
        one = len(self._levels[0]["conversations"]) - 1

        def staying(level: int) -> int:
            wished = self._configuration({**dict.fromkeys(_ORDER, 0), "draft": level, "conversations": one})
            return sum(item.bytes for item in self._items(wished) if item.name != "loading")

        return staying(0) - staying(1)

    def plan(self, budget: int | None) -> MemoryPlan:
        found = self._solve_all(budget)
        chosen = min(found, key=self._rank)
        plan = self._plan(chosen, budget)
        others = (other for other in found if other["draft_device"] > chosen["draft_device"])
        alike = (other for other in others if self._rank(other)[:_DEVICE] == self._rank(chosen)[:_DEVICE])
        if not plan.configuration.draft or not plan.fits or (other := next(alike, None)) is None:
            return plan
        on_cpu = self._plan(other, budget)
        # That is chosen for its speed, and not for want of memory.
        given_up = tuple(loss for loss in on_cpu.given_up if loss.what != "draft_device")
        return replace(plan, on_cpu=replace(on_cpu, given_up=given_up, next_larger=None))

    def _plan(self, chosen: dict[str, int], budget: int | None) -> MemoryPlan:
        configuration = self._configuration(chosen)
        # What can be wished for on the same device, and a window no larger than the context.
        best = self._configuration({**dict.fromkeys(_ORDER, 0), "draft_device": chosen["draft_device"]})
        first = self._levels[0]["draft_device"][0]
        wished = replace(best, draft_window=configuration.context, draft_device=first)
        items = self._items(configuration)
        total, on_host = self._sums(items)
        given_up = []
        for part in reversed(_ORDER):
            if part == "draft":
                name = "head" if best.head else "draft"
                had, has = bool(chosen[part]), False
            else:
                name, had, has = part, getattr(wished, part), getattr(configuration, part)
            if had == has or (part.startswith("draft_") and not configuration.draft):
                continue
            back, host_back = self._total({**chosen, part: 0})
            missing, host_missing = _missing(back, budget or 0), _missing(host_back, self._host_budget)
            given_up.append(GivenUp(name, had, has, missing, host_missing))
        plan = MemoryPlan(
            configuration, items, total, budget, tuple(given_up), None, self._pools, on_host, self._host_budget
        )
        return replace(plan, next_larger=self._next_larger(chosen)) if budget is not None and plan.fits else plan

    def _solve(self, budget: int | None) -> dict[str, int]:
        """The best that fits; where nothing does, the least."""
        return min(self._solve_all(budget), key=self._rank)

    def _solve_all(self, budget: int | None) -> list[dict[str, int]]:
        """The same for each device of the draft; those that fit, if there are any."""
        solved = [self._solve_on(device, budget) for device in range(len(self._levels))]
        fitting = [chosen for chosen in solved if self._fits(chosen, budget)]
        return fitting or solved

    def _solve_on(self, device: int, budget: int | None) -> dict[str, int]:
        """The first level of each part, the most valuable part first, with which what is left still fits."""
        chosen = self._lowest(device)
        # What loading takes for a moment leaves room for more than the least, even where that does not fit.
        least, host_least = self._total(chosen)
        limit = None if budget is None else max(budget, least)
        host_limit = None if self._host_budget is None else max(self._host_budget, host_least)
        for part in _ORDER:
            if part == "draft_device":
                continue
            levels = range(chosen[part])  # where none of them fits, the lowest stays

            def fits(level: int, part: str = part) -> bool:
                total, on_host = self._total({**chosen, part: level})
                return within(total, limit) and within(on_host, host_limit)

            if part == "draft":
                chosen[part] = next(filter(fits, levels), chosen[part])
            else:
                chosen[part] = bisect_left(levels, True, key=fits)
        return chosen

    def _next_larger(self, chosen: Mapping[str, int]) -> NextLarger | None:
        """A better plan differs first in some part, by one level at least, and leaves the rest as small as can be."""
        budgets = set()
        for device in range(len(self._levels)):
            better = self._lowest(device)
            for part in _ORDER:
                if part == "draft_device":
                    budgets.add(self._total(better)[0])
                    continue
                steps = range(chosen[part]) if part == "draft" else range(chosen[part] - 1, chosen[part])
                budgets |= {self._total({**better, part: level})[0] for level in steps if level >= 0}
                better[part] = chosen[part]
        own = self._total(chosen)[0]
        for budget in sorted(budgets):
            if budget > own and self._rank(solved := self._solve(budget)) < self._rank(chosen):
                return NextLarger(budget, self._configuration(solved))
        return None

    def _lowest(self, device: int) -> dict[str, int]:
        return {part: device if part == "draft_device" else len(self._levels[device][part]) - 1 for part in _ORDER}

    def _rank(self, chosen: Mapping[str, int]) -> tuple[int, ...]:
        """What comes first is better. Without a draft, nothing about it counts."""
        has_draft = self._configuration(chosen).draft
        return tuple(0 if part.startswith("draft_") and not has_draft else chosen[part] for part in _ORDER)

    def _configuration(self, chosen: Mapping[str, int]) -> Configuration:
        levels = self._levels[chosen["draft_device"]]
        values = {part: levels[part][min(level, len(levels[part]) - 1)] for part, level in chosen.items()}
        drafter = values.pop("draft")
        configuration = Configuration(**values, draft=drafter == "model", head=drafter == "head")
        if not configuration.draft:
            return replace(configuration, draft_device=None, draft_window=0)
        return replace(configuration, draft_window=min(configuration.draft_window, configuration.context))

    def _items(self, configuration: Configuration) -> tuple[MemoryItem, ...]:
        return memory_items(self._manifest, configuration, self._profile)

    def _fits(self, chosen: Mapping[str, int], budget: int | None) -> bool:
        total, on_host = self._total(chosen)
        return within(total, budget) and within(on_host, self._host_budget)

    def _total(self, chosen: Mapping[str, int]) -> tuple[int, int]:
        return self._sums(self._items(self._configuration(chosen)))

    def _sums(self, items: Sequence[MemoryItem]) -> tuple[int, int]:
        """Bytes that the budget is about, and those of the host if that is something else."""
        total = sum(item.bytes for item in items)
        on_host = sum(item.bytes for item in items if item.place == "host") if self._pools == "discrete" else 0
        return total - on_host, on_host


def _missing(size: int, limit: int | None) -> int:
    return 0 if limit is None else max(0, size - limit)
