"""Measures what calls of whatever drafts cost, and how often it says what the target said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from edge_spec.runtime.call_timer import CallTimer, Clock, TimedNetwork
from edge_spec.runtime.costs import CHUNK_ROWS, CallCosts
from edge_spec.runtime.draft_vocabulary import DraftVocabulary
from edge_spec.runtime.logit_rows import LogitRows, top_of
from edge_spec.runtime.model import Model

# Told the stage and which share of it is done.
Progress: TypeAlias = Callable[[str, float], None]

# For every token of a text, the probability of the draft's likeliest token, and whether that was the text's.
Agreement: TypeAlias = tuple[tuple[float, bool], ...]

# Rows of the draft's logits that are compared at once; they take memory.
COMPARED_ROWS = 8
# Turns are taken until enough seconds have passed, at most so many.
MOST_TURNS = 3
_ENOUGH_SECONDS = 0.5
_DRAFT_ROWS = (2, 4, 8)
# The long past stands out from the noise, without making the system provide much memory for a cache that may never be
# filled. It is measured at these row counts.
_FAR_PAST, _LEAST_FAR_PAST = 1024, 128
_FAR_ROWS = (1, 8)


def compare(draft: Model, text: Sequence[int], start: int, vocabulary: DraftVocabulary) -> Agreement:
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
        pairs += [compared(rows, row, token, vocabulary) for row, token in enumerate(told)]
    return tuple(pairs)


def compared(rows: LogitRows, row: int, token: int, vocabulary: DraftVocabulary) -> tuple[float, bool]:
    """The probability of the likeliest token of a row of logits, and whether that is ``token``."""
    top = top_of(rows, row)
    if top is not None and top.likeliest is not None:
        return float(np.exp(min(float(top.peak) - top.log_sum_exp, 0.0))), vocabulary.id_of(top.likeliest) == token
    logits = rows[row]
    highest = float(logits.max())
    if not np.isfinite(highest):  # a draft that breaks down is never right
        return 0.0, False
    return 1.0 / float(np.exp(logits - highest).sum()), vocabulary.id_of(int(logits.argmax())) == token


def measure_draft(draft: TimedNetwork, name: str, report: Progress, clock: Clock) -> tuple[CallCosts, float]:
    """Time steps and catching up after the tokens in the draft's cache.

    Returns:
        What calls cost; and what a token costs that is drafted with others in one call, in steps.
    """
    length = draft.cache.length
    widths = [rows for rows in _DRAFT_ROWS if rows <= draft.context // 2]
    far, far_widths = far_past(draft)
    timer = CallTimer(draft, far, clock)
    # The shortest saves least, and is taken for all of them.
    chains = [steps for steps in draft.chain_lengths[:1] if length + steps <= draft.context]
    for steps in chains:  # wakes what sleeps at the first call
        draft.draft((0,), steps)
        draft.cache.rollback(length)

    def step() -> None:
        timer.step(0)
        draft.cache.rollback(length)

    started = clock()
    for turn in range(MOST_TURNS):
        if clock() - started > _ENOUGH_SECONDS:
            break
        report(name, turn / MOST_TURNS)
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


def far_past(model: TimedNetwork) -> tuple[int, tuple[int, ...]]:
    """The long past that fits the context, and the row counts to measure with it."""
    past = min(_FAR_PAST, model.context - _FAR_ROWS[-1])
    return past, _FAR_ROWS if past >= _LEAST_FAR_PAST else ()
