"""What an engine has done since it was loaded."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

from edge_spec.runtime.completion import Completion
from edge_spec.runtime.statistics import AcceptanceFigures, add_elementwise


@dataclass(frozen=True)
class EngineMemory:
    """Where an engine's memory stands, in bytes.

    Attributes:
        planned: the peak that was planned at loading, what lies on a GPU with memory of its own left aside.
        resident: of the whole process now; ``None`` where the system does not say.
        target_caches: keys and values of all texts now.
    """

    planned: int
    resident: int | None
    target_caches: int


@dataclass(frozen=True)
class EngineStatistics(AcceptanceFigures):
    """Counts and times over all finished generations of an engine; times are in seconds.

    Attributes:
        running: texts that are being written now.
        waiting: of all texts that are being written or wait to be, how many want a turn that they do not have.
        finished: generations that ended, by their finish reason.
        memory: where its memory stands.
        prompt_tokens, reused_tokens, new_tokens, rounds, plain_rounds, drafted, accepted, deferred: sums of what
            :class:`edge_spec.Statistics` counts, and so are the times and the lists and tables below.
    """

    running: int
    waiting: int
    finished: dict[str, int]
    memory: EngineMemory
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    deferred: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens by the time spent on rounds, those of the first rounds included; 0 before the first."""
        seconds = self.total_seconds - self.prefill_seconds
        return self.new_tokens / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return counts, times and the figures derived from them, ready for JSON."""
        derived = ("mean_accepted_length", "acceptance_rate", "acceptance_by_position", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


_COUNTS = (
    "prompt_tokens",
    "reused_tokens",
    "new_tokens",
    "rounds",
    "plain_rounds",
    "drafted",
    "accepted",
    "deferred",
)
_TIMES = (
    "waiting_seconds",
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "overhead_seconds",
    "total_seconds",
)
_POSITIONS = ("drafted_by_position", "accepted_by_position")


class Totals:
    """Sums over generations; any thread may add to them."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = Lock()
        self._finished: dict[str, int] = {}
        self._by_drafter: dict[str, int] = {}
        self._sums: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        self._sums.update(dict.fromkeys(_TIMES, 0.0))
        self._sums.update({name: [] for name in _POSITIONS})

    def add(self, completion: Completion) -> None:
        """Count a generation that has ended."""
        statistics, reason = completion.statistics, completion.finish_reason
        with self._lock:
            self._finished[reason] = self._finished.get(reason, 0) + 1
            for name in (*_COUNTS, *_TIMES):
                self._sums[name] += getattr(statistics, name)
            for name in _POSITIONS:
                self._sums[name] = add_elementwise(self._sums[name], getattr(statistics, name))
            for drafter, tokens in statistics.accepted_by_drafter.items():
                self._by_drafter[drafter] = self._by_drafter.get(drafter, 0) + tokens

    def statistics(self, running: int, waiting: int, memory: EngineMemory) -> EngineStatistics:
        """The sums, and how things stand."""
        with self._lock:
            sums: dict[str, Any] = {name: copy(value) for name, value in self._sums.items()}
            return EngineStatistics(
                running, waiting, dict(self._finished), memory, accepted_by_drafter=dict(self._by_drafter), **sums
            )
