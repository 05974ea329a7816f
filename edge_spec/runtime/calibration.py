"""Measures, in a few seconds, what the calls of a pair cost here and how often its draft model is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.call_timer import CallTimer, Clock, TimedNetwork
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CHUNK_ROWS, CallCosts, Costs
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.logit_rows import LogitRows, likeliest_of, top_of
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.model import Model
from edge_spec.runtime.timed_block import TimedBlock, guesses
from edge_spec.runtime.timed_head import TimedHead

# Neutral prose, with an end that neither asks for one certain word nor leaves everything open.
TEXT = "The library in our town opens at nine in the morning. On Saturdays it"

Progress = Callable[[str, float], None]

AnyHead: TypeAlias = HeadModel | MedusaHeads | BlockHead

# The usual row counts all, since kernels work in blocks and the costs have steps; of the others a few.
_TARGET_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
# Measured twice even where calls are long. The others lie between two of these, and cost no more than the wider one.
_CHECKED_ROWS = (2, 4, 6, 8)
_DRAFT_ROWS = (2, 4, 8)
# Nothing is gained by measuring wider calls than one that costs this many plain steps.
_DEAR = 3.0
# The long past stands out from the noise, without making the system provide much memory for a cache that may never be
# filled. It is measured at these row counts.
_FAR_PAST, _LEAST_FAR_PAST = 1024, 128
_FAR_ROWS = (1, 8)

_TEXT_TOKENS = 16
# Rows of the draft's logits that are compared at once; they take memory.
COMPARED_ROWS = 8
# Turns are taken until so many seconds have passed. The target takes two in any case, the second one cut short.
_ENOUGH_SECONDS = 1.0
_FEWEST_TURNS, _MOST_TURNS = 2, 3
# In seconds; clocks may be too coarse to tell.
_SHORTEST_CALL = 1e-9
_ENOUGH_DRAFT_SECONDS = 0.5
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
    agreement: tuple[tuple[float, bool], ...] = ()

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
        about = text, start, vocabulary or DraftVocabulary(), report, clock
        if isinstance(head, MedusaHeads):
            head_costs, agreement = _measure_medusa(target, head, *about)
        elif isinstance(head, BlockHead):
            head_costs, agreement = _measure_block(target, head, text, start, report, clock)
        else:
            head_costs, agreement = _measure_head(target, head, *about)
        return Calibration(Costs(costs, head_costs, overhead), agreement)
    if draft is None:
        return Calibration(Costs(costs, None, overhead))
    try:
        if draft_tokens is None:
            agreement = _compare(draft, text[: draft.context // 2], start, vocabulary or DraftVocabulary())
        else:
            agreement = ()
            draft.cache.rollback(0)
            draft.prefill(list(draft_tokens[: draft.context // 2]) or [0])
        draft_costs, chain_step = _measure_draft(draft, "draft model", report, clock)
    finally:
        draft.cache.rollback(0)
    return Calibration(Costs(costs, draft_costs, overhead, chain_step), agreement)


def _measure_target(
    target: Model, text: list[int], most_rows: int, report: Progress, clock: Clock
) -> tuple[CallCosts, float]:
    """Append what the target says to ``text``; return the costs of its calls and the seconds between them."""
    widths = [rows for rows in _TARGET_ROWS if rows <= min(target.context // 2, most_rows)] or [1]
    room = target.context - widths[-1]
    far_past, far_widths = _far(target)
    timer = CallTimer(target, far_past, clock)
    between: list[float] = []
    measured: set[int] = set()

    def step() -> None:
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
    for turn in range(_MOST_TURNS):
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


def _compare(
    draft: Model, text: Sequence[int], start: int, vocabulary: DraftVocabulary
) -> tuple[tuple[float, bool], ...]:
    """Let the draft model read ``text`` and compare its guesses for the tokens from ``start`` on."""
    draft.cache.rollback(0)
    if len(text) <= start:
        draft.prefill(text)
        return ()
    draft.prefill(text[: start - 1])
    pairs = []
    for first in range(start, len(text), COMPARED_ROWS):
        told = text[first : first + COMPARED_ROWS]
        rows = draft.forward(text[first - 1 : first - 1 + len(told)], range(len(told)))
        pairs += [_compared(rows, row, token, vocabulary) for row, token in enumerate(told)]
    return tuple(pairs)


def _compared(rows: LogitRows, row: int, token: int, vocabulary: DraftVocabulary) -> tuple[float, bool]:
    """The probability of the likeliest token of a row of logits, and whether that is ``token``."""
    top = top_of(rows, row)
    if top is not None and top.likeliest is not None:
        return float(np.exp(min(float(top.peak) - top.log_sum_exp, 0.0))), vocabulary.id_of(top.likeliest) == token
    logits = rows[row]
    highest = float(logits.max())
    if not np.isfinite(highest):  # a draft that breaks down is never right
        return 0.0, False
    return 1.0 / float(np.exp(logits - highest).sum()), vocabulary.id_of(int(logits.argmax())) == token


def _measure_head(
    target: Model,
    head: HeadModel,
    text: Sequence[int],
    start: int,
    vocabulary: DraftVocabulary,
    report: Progress,
    clock: Clock,
) -> tuple[CallCosts, tuple[tuple[float, bool], ...]]:
    """Let the head read ``text``, compare its guesses for the tokens from ``start`` on, and time its calls."""
    taps = target.cache.taps
    assert taps is not None  # the target was loaded for a head
    text = text[: min(head.context // 2, taps.limit)]
    pairs = []
    try:
        target.prefill(text)
        head.cache.rollback(0)
        for first in range(0, len(text) - 2, COMPARED_ROWS):
            stop = min(first + COMPARED_ROWS, len(text) - 2)  # the row of token p is about token p + 2
            logits, _ = head.forward(text[first + 1 : stop + 1], range(stop - first), taps=taps.read(first, stop))
            told = enumerate(text[first + 2 : stop + 2])
            pairs += [_compared(logits, row, token, vocabulary) for row, token in told if first + row + 2 >= start]
        costs, _ = _measure_draft(TimedHead(head), "head", report, clock)
    finally:
        target.cache.rollback(0)
        head.cache.rollback(0)
    return costs, tuple(pairs)


def _measure_block(
    target: Model, head: BlockHead, text: Sequence[int], start: int, report: Progress, clock: Clock
) -> tuple[CallCosts, tuple[tuple[float, bool], ...]]:
    """Compare what the head says of the next token in some places of ``text`` from ``start`` on, and time its calls."""
    taps = target.cache.taps
    assert taps is not None  # the target was loaded for a head
    text = text[: min(head.context, taps.limit)]
    try:
        target.prefill(text)
        pairs = tuple(guesses(head, text, taps, start))
        timed = TimedBlock(head)
        timed.forward((0,), ())  # the curves begin with a step behind something
        costs, _ = _measure_draft(timed, "head", report, clock)
    finally:
        target.cache.rollback(0)
    return costs, pairs


def _measure_medusa(
    target: Model,
    heads: MedusaHeads,
    text: Sequence[int],
    start: int,
    vocabulary: DraftVocabulary,
    report: Progress,
    clock: Clock,
) -> tuple[CallCosts, tuple[tuple[float, bool], ...]]:
    """Compare what the first head says for the tokens of ``text`` from ``start`` on, and time calls meanwhile."""
    taps = target.cache.taps
    assert taps is not None  # the target was loaded for heads
    text = text[: taps.limit]
    pairs, seconds = [], []

    def timed(state: NDArray[np.float32]) -> NDArray[np.float32]:
        started = clock()
        logits = heads.logits(state)
        seconds.append(clock() - started)
        return logits

    timed(np.full((1, taps.width), 0.1, np.float32))  # also where the text is too short
    try:
        target.prefill(text)
        for place in range(max(start, 2), len(text)):
            report("head", place / len(text))
            logits = timed(taps.read(place - 2, place - 1))
            pairs.append(_compared(logits, 0, text[place], vocabulary))
    finally:
        target.cache.rollback(0)
    # A call has one row, and no cache grows beneath it.
    usual = max(sorted(seconds)[len(seconds) // 2], _SHORTEST_CALL)
    return CallCosts(CostCurve((1,), (usual,), (0.0,))), tuple(pairs)


def _measure_draft(draft: TimedNetwork, name: str, report: Progress, clock: Clock) -> tuple[CallCosts, float]:
    """Time steps and catching up after the tokens in the draft's cache.

    Returns:
        What calls cost; and what a token costs that is drafted with others in one call, in steps.
    """
    length = draft.cache.length
    widths = [rows for rows in _DRAFT_ROWS if rows <= draft.context // 2]
    far_past, far_widths = _far(draft)
    timer = CallTimer(draft, far_past, clock)
    # The shortest saves least, and is taken for all of them.
    chains = [steps for steps in draft.chain_lengths[:1] if length + steps <= draft.context]
    for steps in chains:  # wakes what sleeps at the first call
        draft.draft((0,), steps)
        draft.cache.rollback(length)

    def step() -> None:
        timer.step(0)
        draft.cache.rollback(length)

    started = clock()
    for turn in range(_MOST_TURNS):
        if clock() - started > _ENOUGH_DRAFT_SECONDS:
            break
        report(name, turn / _MOST_TURNS)
        step()
        for rows in widths:
            timer.call(rows, (rows - 1,))
            step()
        for steps in chains:
            timer.chain(steps)
            step()
        if far_widths:
            timer.call(1, (0,), far=True)
            step()
        if turn == 0 and length + CHUNK_ROWS <= draft.context:
            timer.call(CHUNK_ROWS, ())
            step()
    report(name, 1.0)
    return CallCosts(timer.curve()), timer.chain_step


def _far(model: TimedNetwork) -> tuple[int, tuple[int, ...]]:
    """The long past that fits the context, and the row counts to measure with it."""
    past = min(_FAR_PAST, model.context - _FAR_ROWS[-1])
    return past, _FAR_ROWS if past >= _LEAST_FAR_PAST else ()


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) in (int, float)
        and 0.0 <= pair[0] <= 1.0
        and type(pair[1]) is bool
    )
