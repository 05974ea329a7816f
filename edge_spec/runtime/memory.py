"""The memory plan: the best configuration whose predicted peak stays within a budget, before anything is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge_spec.errors import MemoryBudgetError, RequestError
from edge_spec.manifest import CacheType, Manifest
from edge_spec.runtime.configuration import WIDEST, Configuration
from edge_spec.runtime.memory_law import MemoryItem, memory_items
from edge_spec.runtime.memory_profile import MemoryProfile
from edge_spec.runtime.memory_table import describe_loss, describe_plan

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
# int8 leaves the text as it is, and a shorter context leaves what fits it.
_ORDER = ("context", "target_kv", "draft", "draft_kv", "draft_window", "widest", "conversations")


@dataclass(frozen=True)
class GivenUp:
    """Something wished for that does not fit.

    Attributes:
        what: field of :class:`Configuration`.
        wished, planned: its values.
        missing_bytes: what the budget lacks to have this back, and nothing else.
    """

    what: str
    wished: Any
    planned: Any
    missing_bytes: int

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
        items: what takes how much; their sum is ``total_bytes``.
        total_bytes: the predicted peak of the whole process.
        budget_bytes: what it had to stay within; ``None``: no limit.
        given_up: what was wished for and does not fit, what is given up first being first.
        next_larger: what a larger budget would bring; ``None`` where nothing was given up, or nothing fits.
    """

    configuration: Configuration
    items: tuple[MemoryItem, ...]
    total_bytes: int
    budget_bytes: int | None
    given_up: tuple[GivenUp, ...]
    next_larger: NextLarger | None

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the budget."""
        return self.budget_bytes is None or self.total_bytes <= self.budget_bytes

    def require_fit(self) -> MemoryPlan:
        """Return the plan itself. Raises MemoryBudgetError, with the table, if it does not fit its budget."""
        if not self.fits:
            raise MemoryBudgetError(
                f"This bundle does not fit its memory budget; this is the least it takes:\n{self}\n"
                "Give a larger budget, or a smaller context if you asked for one, free memory, or export the target "
                "with a smaller recipe (--recipe int4)."
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {"fits": self.fits, **asdict(self)}

    def __str__(self) -> str:
        return describe_plan(self)


def plan_memory(
    manifest: Manifest,
    budget: int | None,
    context: int | None = None,
    conversations: int = DEFAULT_CONVERSATIONS,
    kv_types: Mapping[str, Sequence[CacheType]] | None = None,
    profile: MemoryProfile | None = None,
) -> MemoryPlan:
    """Find the best configuration within a budget.

    Args:
        manifest: what the bundle says of itself.
        budget: bytes of the whole process at its peak; ``None``: no limit.
        context: tokens of context that are insisted on; ``None``: 4096 or the model's limit, less if need be.
        conversations: wished number of texts of a whole context that can be kept at once.
        kv_types: for ``"target"`` and ``"draft"``, how their graphs can store keys and values, the best first;
            ``None``: in their own type only.
        profile: what an earlier load measured here.

    Returns:
        The plan; where nothing fits, that of the smallest configuration.

    Raises:
        RequestError: an argument is out of range.
    """
    return _Planner(manifest, _levels(manifest, context, conversations, kv_types), profile).plan(budget)


def _levels(
    manifest: Manifest,
    context: int | None,
    conversations: int,
    kv_types: Mapping[str, Sequence[CacheType]] | None,
) -> dict[str, Sequence[Any]]:
    """The values each part of a configuration can have, what is wished first."""
    limit = manifest.context_length
    if context is not None and not 2 <= context <= limit:
        raise RequestError(f"context is {context}, expected 2 to {limit}, the limit of this bundle's target.")
    if not 1 <= conversations <= MOST_CONVERSATIONS:
        raise RequestError(f"conversations is {conversations}, expected 1 to {MOST_CONVERSATIONS:,}.")
    own: CacheType = "float32" if manifest.device == "cpu" else "float16"
    types = {"target": (own,), "draft": (own,), **(kv_types or {})}
    wished = min(DEFAULT_CONTEXT, limit) if context is None else context
    return {
        "context": (wished, *(() if context is not None else (size for size in _CONTEXTS if size < wished))),
        "target_kv": tuple(types["target"]),
        "draft": (False,) if manifest.draft is None else (True, False),
        "draft_kv": tuple(types["draft"]),
        "draft_window": (wished, *(size for size in _WINDOWS if size < wished)),
        "widest": _WIDTHS,
        "conversations": range(conversations, 0, -1),
    }


class _Planner:
    """Searches the levels. Every step down takes less memory, so it suffices to decide one part after the other."""

    def __init__(self, manifest: Manifest, levels: Mapping[str, Sequence[Any]], profile: MemoryProfile | None) -> None:
        self._manifest = manifest
        self._levels = levels
        self._profile = profile

    def plan(self, budget: int | None) -> MemoryPlan:
        least = self._total(self._lowest())
        # What loading takes for a moment leaves room for more than the least, even where that does not fit.
        chosen = self._solve(budget if budget is None else max(budget, least))
        configuration = self._configuration(chosen)
        # A window no larger than the context is all that can be wished for.
        wished = replace(self._configuration(dict.fromkeys(_ORDER, 0)), draft_window=configuration.context)
        items = self._items(configuration)
        total = sum(item.bytes for item in items)
        given_up = []
        for part in reversed(_ORDER):
            if (had := getattr(wished, part)) == (has := getattr(configuration, part)) or (
                part.startswith("draft_") and not configuration.draft
            ):
                continue
            back = self._total({**chosen, part: 0})
            given_up.append(GivenUp(part, had, has, max(0, back - (budget or 0))))
        next_larger = None if budget is None or least > budget else self._next_larger(chosen)
        return MemoryPlan(configuration, items, total, budget, tuple(given_up), next_larger)

    def _solve(self, budget: int | None) -> dict[str, int]:
        """The first level of each part, the most valuable part first, with which what is left still fits."""
        chosen = self._lowest()
        for part in _ORDER:
            levels = range(chosen[part])  # where none of them fits, the lowest stays

            def fits(level: int, part: str = part) -> bool:
                return budget is None or self._total({**chosen, part: level}) <= budget

            chosen[part] = bisect_left(levels, True, key=fits)
        return chosen

    def _next_larger(self, chosen: Mapping[str, int]) -> NextLarger | None:
        """A better plan differs first in some part, by one level at least, and leaves the rest as small as can be."""
        totals = []
        better = self._lowest()
        for part in _ORDER:
            if chosen[part] > 0:
                totals.append(self._total({**better, part: chosen[part] - 1}))
            better[part] = chosen[part]
        own = self._total(chosen)
        budgets = [total for total in totals if total > own]
        if not budgets:
            return None
        budget = min(budgets)
        return NextLarger(budget, self._configuration(self._solve(budget)))

    def _lowest(self) -> dict[str, int]:
        return {part: len(self._levels[part]) - 1 for part in _ORDER}

    def _configuration(self, chosen: Mapping[str, int]) -> Configuration:
        values = {part: self._levels[part][level] for part, level in chosen.items()}
        configuration = Configuration(**values)
        window = min(configuration.draft_window, configuration.context) if configuration.draft else 0
        return replace(configuration, draft_window=window)

    def _items(self, configuration: Configuration) -> tuple[MemoryItem, ...]:
        return memory_items(self._manifest, configuration, self._profile)

    def _total(self, chosen: Mapping[str, int]) -> int:
        return sum(item.bytes for item in self._items(self._configuration(chosen)))
