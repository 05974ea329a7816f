"""Whether one call that drafts several tokens gives those of single steps, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np

from edge_spec.runtime.model import Model
from gpu_checks.check import Finding

_TOKENS = 40
_REPEAT = 15


def check_drafting(draft: Model, columns: int) -> Iterator[Finding]:
    """Draft with every length there is.

    Args:
        draft: the draft model.
        columns: ids to draw a text from.
    """
    if not draft.chain_lengths:
        yield Finding("several tokens in one call", "no such graph is used", verdict="not run")
    text = np.random.default_rng(2).integers(0, columns, _TOKENS).tolist()
    for steps in draft.chain_lengths:
        chained, single = _chained(draft, text, steps), _stepped(draft, text, steps)
        taken = {"chain": [], "steps": []}
        for _ in range(_REPEAT):
            for name, how in (("chain", _chained), ("steps", _stepped)):
                draft.cache.rollback(0)
                draft.prefill(text[:-1])
                started = perf_counter()
                how(draft, text, steps)
                taken[name].append(perf_counter() - started)
        each = {name: 1000 * median(seconds) / steps for name, seconds in taken.items()}
        alike = "the same" if chained == single else f"{chained}, not {single}"
        yield Finding.judged(
            f"{steps} tokens in one call",
            f"{alike}; a token takes {each['chain']:.2f} ms, by single steps {each['steps']:.2f}",
            "the tokens of single steps",
            chained == single,
            each,
        )


def _chained(draft: Model, text: list[int], steps: int) -> list[int]:
    _read(draft, text)
    return list(draft.draft(text[-1:], steps).tokens)


def _stepped(draft: Model, text: list[int], steps: int) -> list[int]:
    _read(draft, text)
    tokens, last = [], text[-1]
    for _ in range(steps):
        rows = draft.forward([last], [0])
        last = int(np.argmax(rows[0]))
        tokens.append(last)
    return tokens


def _read(draft: Model, text: list[int]) -> None:
    draft.cache.rollback(min(draft.cache.length, len(text) - 1))
    if draft.cache.length < len(text) - 1:
        draft.prefill(text[draft.cache.length : -1])
