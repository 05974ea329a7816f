"""Measures, in a few seconds, what the calls of a pair cost here and how often its draft model is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from edge_spec.runtime.call_timer import CallTimer, Clock
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.draft_measurement import MOST_TURNS, Agreement, Progress, compare, far_past, measure_draft
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.head_measurement import AnyHead, measure_head
from edge_spec.runtime.logit_rows import likeliest_of
from edge_spec.runtime.model import Model

# Neutral prose, with an end that neither asks for one certain word nor leaves everything open.
TEXT = "The library in our town opens at nine in the morning. On Saturdays it"

# The usual row counts all, since kernels work in blocks and the costs have steps; of the others a few.
_TARGET_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
# Measured twice even where calls are long. The others lie between two of these, and cost no more than the wider one.
_CHECKED_ROWS = (2, 4, 6, 8)
# Nothing is gained by measuring wider calls than one that costs this many plain steps.
_DEAR = 3.0

_TEXT_TOKENS = 16
# Turns are taken until so many seconds have passed. The target takes two in any case, the second one cut short.
_ENOUGH_SECONDS = 1.0
_FEWEST_TURNS = 2
_MOST_PAIRS = 1024


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        costs: of both models' calls.
        agreement: for every token of a short text that the target wrote, the probability of the draft model's or the
            head's likeliest token, and whether that was the target's. Empty without either.
    """

    costs: Costs
    agreement: Agreement = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {**self.costs.to_dict(), "agreement": [list(pair) for pair in self.agreement]}

    @classmethod
    def from_dict(cls, body: Any) -> Calibration:
        """Read what :meth:`to_dict` returned. Raises ValueError if it is anything else."""
        costs = Costs.from_dict(body)
        pairs = body.get("agreement")
        if not isinstance(pairs, list) or len(pairs) > _MOST_PAIRS or not all(map(_is_pair, pairs)):
            raise ValueError(f"agreement is {str(pairs)[:80]}, expected pairs of a probability and a truth value")
        return cls(costs, tuple((float(probability), agreed) for probability, agreed in pairs))


def calibrate(
    target: Model,
    draft: Model | None,
    tokens: Sequence[int],
    progress: Progress | None = None,
    clock: Clock = perf_counter,
    most_rows: int = _TARGET_ROWS[-1],
    vocabulary: DraftVocabulary | None = None,
    draft_tokens: Sequence[int] | None = None,
    head: AnyHead | None = None,
) -> Calibration:
    """Measure a pair.

    The target continues ``tokens`` greedily, with a call of another width after every step; then the draft model reads
    what it wrote.

    Args:
        target: its cache is emptied.
        draft: likewise; ``None`` if the pair has none.
        tokens: a short text, such as that of :data:`TEXT`.
        progress: told the stage and which share of it is done.
        clock: seconds.
        most_rows: rows of the widest call that a round can have.
        vocabulary: what the columns of the draft's or the head's logits stand for; ``None`` for the target's ids, one
            by one.
        draft_tokens: the short text in the draft's own tokens, if those are not the target's. Then it is not compared.
        head: in place of a draft; its cache is emptied. The target then tells the hidden states that it reads.
    """
    report = progress or (lambda stage, done: None)
    text = list(tokens[: min(_TEXT_TOKENS, max(1, target.context // 4))]) or [0]
    start = len(text)
    try:
        costs, overhead = _measure_target(target, text, most_rows, report, clock)
    finally:
        target.cache.rollback(0)
    if head is not None:
        known = vocabulary or DraftVocabulary()
        head_costs, agreement = measure_head(target, head, text, start, known, report, clock)
        return Calibration(Costs(costs, head_costs, overhead), agreement)
    if draft is None:
        return Calibration(Costs(costs, None, overhead))
    try:
        if draft_tokens is None:
            agreement = compare(draft, text[: draft.context // 2], start, vocabulary or DraftVocabulary())
        else:
            agreement = ()
            draft.cache.rollback(0)
            draft.prefill(list(draft_tokens[: draft.context // 2]) or [0])
        draft_costs, chain_step = measure_draft(draft, "draft model", report, clock)
    finally:
        draft.cache.rollback(0)
    return Calibration(Costs(costs, draft_costs, overhead, chain_step), agreement)


def _measure_target(
    target: Model, text: list[int], most_rows: int, report: Progress, clock: Clock
) -> tuple[CallCosts, float]:
    """Append what the target says to ``text``; return the costs of its calls and the seconds between them."""
    widths = [rows for rows in _TARGET_ROWS if rows <= min(target.context // 2, most_rows)] or [1]
    room = target.context - widths[-1]
    far, far_widths = far_past(target)
    timer = CallTimer(target, far, clock)
    between: list[float] = []
    measured: set[int] = set()

    read = {0}  # tokens that have been read: 0 is what wide calls consist of

    def step() -> None:
        if text[-1] not in read:
            # A row of the embedding may have to come from the disk, once. That is no cost of calls, and taking it for
            # one makes wide calls look cheap or dear, as it happens.
            read.add(text[-1])
            target.forward((text[-1],), (0,))
            target.cache.rollback(len(text) - 1)
        logits = timer.step(text[-1])
        answered = clock()
        known = likeliest_of(logits, 0)
        token = int(np.argmax(logits[0])) if known is None else known
        between.append(clock() - answered)
        if len(text) < room:
            text.append(token)
        else:  # the last token is read again and again
            target.cache.rollback(len(text) - 1)

    report("target", 0.0)  # whatever this starts is not to start between two calls
    target.cache.rollback(0)
    target.prefill(text)  # also wakes what sleeps at the first call
    target.cache.rollback(len(text) - 1)
    started = clock()
    for turn in range(MOST_TURNS):
        if turn and clock() - started > _ENOUGH_SECONDS:
            if turn >= _FEWEST_TURNS:
                break
            widths = [rows for rows in widths if rows in _CHECKED_ROWS]
        for index, rows in enumerate(widths):
            step()
            measured.add(rows)
            # Once more before a single disturbance makes us believe it.
            if timer.call(rows, range(rows)) > _DEAR and timer.call(rows, range(rows)) > _DEAR:
                break
            report("target", min(1.0, (turn + index / len(widths)) / _FEWEST_TURNS))
        for rows in far_widths:
            step()
            rows = min(rows, max(measured))
            timer.call(rows, range(rows), far=True)
    report("target", 1.0)
    return CallCosts(timer.curve()), median(between)


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) in (int, float)
        and 0.0 <= pair[0] <= 1.0
        and type(pair[1]) is bool
    )
