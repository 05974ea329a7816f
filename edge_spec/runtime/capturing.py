"""Runs a call of every shape that CUDA graphs are captured for, before anybody waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from edge_spec.runtime.model import Model

# What is left after so many seconds is captured when it first comes up.
_ENOUGH_SECONDS = 10.0


def capture(model: Model, last_row: bool, clock: Callable[[], float] = perf_counter) -> None:
    """Have a model's calls captured, as far as some seconds reach; its cache is as before.

    ONNX Runtime keeps captured graphs with the thread that ran them. Another thread's first call of a shape captures it
    again, which takes three runs.

    Args:
        model: nothing happens if its calls are not captured.
        last_row: whether calls usually want the logits of one row only, as a draft's do.
        clock: seconds.
    """
    started, length = clock(), model.cache.length
    try:
        for past, call in _calls(model, last_row):
            if clock() - started > _ENOUGH_SECONDS:
                break
            if past >= length:
                model.cache.fill(past)
                call()
                model.cache.rollback(length)
    finally:
        model.cache.rollback(min(length, model.cache.length))


def _calls(model: Model, last_row: bool) -> Iterator[tuple[int, Callable[[], object]]]:
    """Calls, and how many tokens the cache holds before each."""
    totals = set()
    for shape in model.captured_shapes(last_row):
        assert shape.total is not None  # all of them have one
        end = min(shape.total, model.context)
        if end not in totals:  # the smallest buckets first
            totals.add(end)
            for steps in model.chain_lengths:
                yield end - steps, lambda steps=steps: model.draft([0], steps)  # type: ignore[misc]
        yield end - shape.rows, lambda shape=shape: model.forward([0] * shape.rows, range(shape.logit_rows))  # type: ignore[misc]
