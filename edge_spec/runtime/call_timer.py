"""Times calls of a model next to plain steps, so that whatever else slows the machine down hits both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, median_low
from typing import Protocol

from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.logit_rows import LogitRows

Clock = Callable[[], float]

# Plain steps on either side of a call that say how fast the machine was just then.
_NEIGHBOURS = 2


class TimedNetwork(Protocol):
    """Whatever has calls to be timed: a model, or a head with inputs of its own making."""

    @property
    def cache(self) -> KVCache:
        """That of the current text."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        ...

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """How many tokens one call can draft, the fewest first."""
        ...

    def forward(self, token_ids: Sequence[int], logit_rows: Sequence[int]) -> LogitRows:
        """Append tokens to the cache and return the logits of chosen rows."""
        ...

    def draft(self, token_ids: Sequence[int], steps: int) -> DraftedChain:
        """Append tokens to the cache, and draft those that follow in the same call."""
        ...


class CallTimer:
    """Collects times of one model's calls.

    Args:
        model: whose calls.
        far_past: tokens in the cache at calls with a long past; it must leave room for those calls.
        clock: seconds.
    """

    def __init__(self, model: TimedNetwork, far_past: int, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._far_past = far_past
        self._far_is_filled = False
        self._steps: list[float] = []
        self._pasts: list[int] = []
        # Seconds of the calls by row count and nearness, each with the number of plain steps before it.
        self._calls: dict[tuple[int, bool], list[tuple[int, float]]] = {}
        # Seconds a token of the calls that drafted several, likewise.
        self._chains: list[tuple[int, float]] = []

    def step(self, token: int) -> LogitRows:
        """Append one token and return its logits, one row."""
        self._pasts.append(self._model.cache.length)
        started = self._clock()
        logits = self._model.forward((token,), (0,))
        self._steps.append(self._clock() - started)
        return logits

    def call(self, rows: int, logit_rows: Sequence[int], far: bool = False) -> float:
        """Run a call after at least one step and leave the cache as it was.

        Args:
            rows: tokens of the call.
            logit_rows: which of them yield logits.
            far: whether it finds a long past; otherwise what the cache holds.

        Returns:
            How many times as long as the quicker of the last steps it took.
        """
        cache = self._model.cache
        length = cache.length
        if far and not self._far_is_filled:
            cache.fill(self._far_past)
            self._far_is_filled = True
        if far:
            cache.length = self._far_past
        tokens = [0] * rows
        started = self._clock()
        self._model.forward(tokens, logit_rows)
        seconds = self._clock() - started
        cache.rollback(length)
        self._calls.setdefault((rows, far), []).append((len(self._steps), seconds))
        return seconds / min(self._steps[-_NEIGHBOURS:])

    def chain(self, steps: int) -> None:
        """Draft so many tokens in one call after at least one step, and leave the cache as it was."""
        length = self._model.cache.length
        started = self._clock()
        self._model.draft((0,), steps)
        seconds = self._clock() - started
        self._model.cache.rollback(length)
        self._chains.append((len(self._steps), seconds / steps))

    @property
    def chain_step(self) -> float:
        """What a token of such a call costs, in plain steps; 1 if there was none."""
        ratios = [seconds / self._step_around(index) for index, seconds in self._chains]
        return median_low(ratios) if ratios else 1.0

    def curve(self) -> CostCurve:
        """Everything that was timed as one curve: what a usual step costs, times how much dearer calls were."""
        step = median(self._steps)
        near = {1: step}
        far = {}
        for (rows, is_far), calls in self._calls.items():
            cost = step * median_low([seconds / self._step_around(index) for index, seconds in calls])
            if is_far:
                far[rows] = cost
            elif rows > 1:
                near[rows] = cost
        return CostCurve.fit(median_low(self._pasts), near, self._far_past, far)

    def _step_around(self, index: int) -> float:
        return median_low(self._steps[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS])
