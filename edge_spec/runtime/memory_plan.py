"""What a memory plan says: how a pair is loaded, what that takes and where, and what was given up for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_spec.errors import MemoryBudgetError
from edge_spec.runtime.configuration import Configuration
from edge_spec.runtime.drafter_outlook import Outlook
from edge_spec.runtime.memory_law import MemoryItem
from edge_spec.runtime.memory_table import describe_loss, describe_plan

# What computes, and whose memory it computes in: the CPU; a GPU that shares the machine's memory (Jetson); or one with
# memory of its own.
Pools = Literal["cpu", "unified", "discrete"]

# What a plan for the CPU need not say.
_ONLY_ON_GPUS = ("pools", "place", "draft_device", "host_bytes", "host_budget_bytes", "host_missing_bytes", "on_cpu")
# What a plan for a bundle without a head need not say.
_ONLY_WITH_HEADS = ("head", "outlooks")


@dataclass(frozen=True)
class GivenUp:
    """Something wished for that does not fit.

    Attributes:
        what: field of :class:`Configuration`; ``"draft"`` or ``"head"`` where another drafter, or none, is loaded.
        wished, planned: its values.
        missing_bytes: what the budget lacks to have this back, and nothing else.
        host_missing_bytes: what the host's memory lacks for it, beside a GPU with memory of its own.
    """

    what: str
    wished: Any
    planned: Any
    missing_bytes: int
    host_missing_bytes: int = 0

    def __str__(self) -> str:
        return describe_loss(self)


@dataclass(frozen=True)
class NextLarger:
    """The smallest budget with a better plan.

    Attributes:
        budget_bytes: that budget.
        configuration: what is planned with it.
    """

    budget_bytes: int
    configuration: Configuration


@dataclass(frozen=True)
class MemoryPlan:
    """How a pair is loaded, and what that takes.

    Attributes:
        configuration: what was decided.
        items: what takes how much, and where.
        total_bytes: the predicted peak of what the budget is about: the whole process; beside a GPU with memory of its
            own, what of it lies there.
        budget_bytes: what it had to stay within; ``None``: no limit.
        given_up: what was wished for and does not fit, what is given up first being first.
        next_larger: what a larger budget would bring; ``None`` where nothing was given up, or nothing fits.
        pools: what it is planned for.
        host_bytes, host_budget_bytes: the same for the host, beside a GPU with memory of its own; else 0 and ``None``.
        on_cpu: the plan with the draft on the CPU, where that fits beside a target on a GPU as well as this one: which
            of the two is faster only measuring tells.
        outlooks: of a bundle with a head, what it and the draft model are expected to gain, the preferred first.
    """

    configuration: Configuration
    items: tuple[MemoryItem, ...]
    total_bytes: int
    budget_bytes: int | None
    given_up: tuple[GivenUp, ...]
    next_larger: NextLarger | None
    pools: Pools = "cpu"
    host_bytes: int = 0
    host_budget_bytes: int | None = None
    on_cpu: MemoryPlan | None = None
    outlooks: tuple[Outlook, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the budget, and what lies on the host within what that has."""
        return within(self.total_bytes, self.budget_bytes) and within(self.host_bytes, self.host_budget_bytes)

    @property
    def budgeted(self) -> tuple[MemoryItem, ...]:
        """The items that the budget is about; their sum is ``total_bytes``."""
        return tuple(item for item in self.items if self.pools != "discrete" or item.place == "device")

    @property
    def process_bytes(self) -> int:
        """The predicted peak of what the process takes of the machine's own memory."""
        return self.host_bytes if self.pools == "discrete" else self.total_bytes

    @property
    def possible(self) -> tuple[MemoryPlan, ...]:
        """This plan, and the one with the draft on the CPU if that is as good as far as memory goes."""
        return (self,) if self.on_cpu is None else (self, self.on_cpu)

    def require_fit(self) -> MemoryPlan:
        """Return the plan itself. Raises MemoryBudgetError, with the table, if it does not fit its budget."""
        if not self.fits:
            last = "or free memory"
            if self.pools == "cpu":
                last = "free memory, or export the target with a smaller recipe (--recipe int4)"
            raise MemoryBudgetError(
                f"This bundle does not fit its memory budget; this is the least it takes:\n{self}\n"
                f"Give a larger budget, or a smaller context if you asked for one, {last}."
            )
        return self

    def arena_bytes(self, weights: bool = True) -> dict[str, int]:
        """Most bytes of the arena of each model on a GPU, by its role as in the items; empty without a budget.

        What the budget has left is shared out among them, since a law may be off.

        Args:
            weights: whether they lie in the arena, and not beside it.
        """
        if self.budget_bytes is None:
            return {}
        planned: dict[str, int] = {}
        for item in self.items:
            role, _, kind = item.name.partition(" ")
            if item.place == "device" and (kind == "workspace" or (weights and kind == "weights")):
                planned[role] = planned.get(role, 0) + item.bytes
        spare = max(0, self.budget_bytes - self.total_bytes)
        return {role: size + spare * size // sum(planned.values()) for role, size in planned.items()}

    def to_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        body = {"fits": self.fits, **asdict(self)}
        unsaid = _ONLY_ON_GPUS if self.pools == "cpu" else ()
        told: dict[str, Any] = _without(body, unsaid + (() if self.outlooks else _ONLY_WITH_HEADS))
        return told

    def __str__(self) -> str:
        return describe_plan(self)


def within(size: int, limit: int | None) -> bool:
    """Whether so many bytes stay within a limit, if there is one."""
    return limit is None or size <= limit


def _without(body: Any, names: tuple[str, ...]) -> Any:
    """JSON without the fields of these names, at any depth."""
    if isinstance(body, Mapping):
        return {name: _without(value, names) for name, value in body.items() if name not in names}
    return [_without(value, names) for value in body] if isinstance(body, list | tuple) else body
