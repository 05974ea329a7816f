"""Measures a head beside the target that it reads: what its calls cost, and how often it is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.call_timer import Clock
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts
from edge_spec.runtime.draft_measurement import COMPARED_ROWS, Agreement, Progress, compared, measure_draft
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.model import Model
from edge_spec.runtime.tap_rows import TapRows
from edge_spec.runtime.timed_block import TimedBlock, guesses
from edge_spec.runtime.timed_head import TimedHead

AnyHead: TypeAlias = HeadModel | MedusaHeads | BlockHead

# In seconds; clocks may be too coarse to tell.
_SHORTEST_CALL = 1e-9


def measure_head(
    target: Model,
    head: AnyHead,
    text: Sequence[int],
    start: int,
    vocabulary: DraftVocabulary,
    report: Progress,
    clock: Clock,
) -> tuple[CallCosts, Agreement]:
    """Let a head of any kind draft in a text.

    Args:
        target: tells the hidden states that the head reads; its cache is empty, before and after.
        head: its cache, if it has one, is emptied.
        text: the target wrote it from ``start`` on.
        start: the first token that is compared.
        vocabulary: what the columns of the head's logits stand for.
        report: told the stage and which share of it is done.
        clock: seconds.

    Returns:
        What calls cost, and how often the likeliest token was right.
    """
    taps = target.cache.taps
    assert taps is not None  # the target was loaded for a head
    text = text[: taps.limit]
    try:
        target.prefill(text)
        if isinstance(head, MedusaHeads):
            return _measure_medusa(head, taps, text, start, vocabulary, report, clock)
        if isinstance(head, BlockHead):
            return _measure_block(head, taps, text, start, report, clock)
        return _measure_recurrent(head, taps, text, start, vocabulary, report, clock)
    finally:
        target.cache.rollback(0)


def _measure_recurrent(
    head: HeadModel,
    taps: TapRows,
    text: Sequence[int],
    start: int,
    vocabulary: DraftVocabulary,
    report: Progress,
    clock: Clock,
) -> tuple[CallCosts, Agreement]:
    """Let the head read ``text``, and compare what each row says."""
    text = text[: head.context // 2]
    pairs = []
    try:
        head.cache.rollback(0)
        for first in range(0, len(text) - 2, COMPARED_ROWS):
            stop = min(first + COMPARED_ROWS, len(text) - 2)  # the row of token p is about token p + 2
            logits, _ = head.forward(text[first + 1 : stop + 1], range(stop - first), taps=taps.read(first, stop))
            told = enumerate(text[first + 2 : stop + 2])
            pairs += [compared(logits, row, token, vocabulary) for row, token in told if first + row + 2 >= start]
        costs, _ = measure_draft(TimedHead(head), "head", report, clock)
    finally:
        head.cache.rollback(0)
    return costs, tuple(pairs)


def _measure_block(
    head: BlockHead, taps: TapRows, text: Sequence[int], start: int, report: Progress, clock: Clock
) -> tuple[CallCosts, Agreement]:
    """Compare what the head says of the next token in some places of ``text``."""
    pairs = tuple(guesses(head, text[: head.context], taps, start))
    timed = TimedBlock(head)
    timed.forward((0,), ())  # the curves begin with a step behind something
    costs, _ = measure_draft(timed, "head", report, clock)
    return costs, pairs


def _measure_medusa(
    heads: MedusaHeads,
    taps: TapRows,
    text: Sequence[int],
    start: int,
    vocabulary: DraftVocabulary,
    report: Progress,
    clock: Clock,
) -> tuple[CallCosts, Agreement]:
    """Compare what the first head says for the tokens of ``text``, and time its calls meanwhile."""
    pairs, seconds = [], []

    def timed(state: NDArray[np.float32]) -> NDArray[np.float32]:
        started = clock()
        logits = heads.logits(state)
        seconds.append(clock() - started)
        return logits

    timed(np.full((1, taps.width), 0.1, np.float32))  # also where the text is too short
    for place in range(max(start, 2), len(text)):
        report("head", place / len(text))
        logits = timed(taps.read(place - 2, place - 1))
        pairs.append(compared(logits, 0, text[place], vocabulary))
    # A call has one row, and no cache grows beneath it.
    usual = max(sorted(seconds)[len(seconds) // 2], _SHORTEST_CALL)
    return CallCosts(CostCurve((1,), (usual,), (0.0,))), tuple(pairs)
