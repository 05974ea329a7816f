"""Whether the likeliest tokens that a graph selects on the device are those of the whole rows, and what a row costs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np

from edge_spec.runtime.logit_rows import SelectedRows
from edge_spec.runtime.model import Model
from gpu_checks.check import Finding

_ROWS = 8
_REPEATS = 20


def check_selection(cuda: Model, columns: int) -> Iterator[Finding]:
    """Compare what comes back from the device with the rows that stay there.

    Args:
        cuda: a target whose graph selects.
        columns: ids to draw a text from.
    """
    tokens = np.random.default_rng(1).integers(0, columns, _ROWS).tolist()
    cuda.cache.rollback(0)
    rows = cuda.forward(tokens, range(_ROWS))
    if not isinstance(rows, SelectedRows):
        yield Finding("selection", "the graph does not select", verdict="not run")
        return
    started = perf_counter()
    whole = np.array(rows)
    seconds = (perf_counter() - started) / _ROWS
    ids, _ = rows.best(64)
    values = np.take_along_axis(whole, ids, axis=1)
    expected = -np.sort(-whole, axis=1)[:, : ids.shape[1]]
    yield Finding.judged(
        "selection: the likeliest of each row",
        f"{np.mean(values == expected):.2%} of the logits as sorted by the CPU",
        "all, descending",
        bool((values == expected).all()) and all(len(set(row)) == len(row) for row in ids.tolist()),
    )
    tops = [rows.top(row) for row in range(_ROWS)]
    exact = np.log(np.exp(whole.astype(np.float64) - whole.max(axis=1, keepdims=True)).sum(axis=1)) + whole.max(axis=1)
    told = np.array([np.nan if top is None else top.log_sum_exp for top in tops])
    off, most = float(np.abs(np.expm1(told - exact)).max()), whole.shape[1] * 2.0**-24 + 2e-5
    yield Finding.judged("selection: log-sum-exp", f"off by {off:.1e} of the sum", f"at most {most:.1e}", off <= most)
    yield Finding.judged(
        "selection: the greedy token",
        "from the likeliest of each row",
        "that of whole rows",
        all(rows.likeliest(row) in (None, int(whole[row].argmax())) for row in range(_ROWS)),
    )
    yield Finding("selection: a whole row from the device", f"{1e6 * seconds:.0f} us")
    for wanted in (1, _ROWS):
        yield Finding(
            f"selection: a call with {wanted} rows of logits", f"{1e3 * _call_seconds(cuda, tokens, wanted):.2f} ms"
        )


def _call_seconds(model: Model, tokens: list[int], wanted: int) -> float:
    seconds = []
    for _ in range(_REPEATS):
        model.cache.rollback(0)
        started = perf_counter()
        model.forward(tokens, range(len(tokens) - wanted, len(tokens)))
        seconds.append(perf_counter() - started)
    return median(seconds[2:])
