"""Whether captured calls compute what others do, in this thread and in another, and what exactness can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from edge_spec.runtime.capturing import capture
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.exactness import FIXED_ROWS, measure_exactness
from edge_spec.runtime.model import Model
from gpu_checks.check import Finding

_ROWS = (1, 2, 4, 8)
_PASTS = (40, 300)


def check_capture(
    open_model: Callable[[DeviceSettings], Model], settings: DeviceSettings, columns: int
) -> Iterator[Finding]:
    """Run the same calls with CUDA graphs and without.

    Args:
        open_model: opens the target.
        settings: as it is used.
        columns: ids to draw a text from.
    """
    if not settings.captures:
        yield Finding("CUDA graphs", "are not used", verdict="not run")
        return
    text = np.random.default_rng(3).integers(0, columns, max(_PASTS) + max(_ROWS)).tolist()
    eager = _logits(open_model(replace(settings, captures=False)), text)
    model = open_model(settings)
    started = perf_counter()
    capture(model, last_row=False)
    yield Finding(
        "CUDA graphs: captured", f"{perf_counter() - started:.1f} s; eager: {model.eager_reason or 'none of them'}"
    )
    with ThreadPoolExecutor(1) as pool:
        for where, found in (
            ("", _logits(model, text)),
            (" again", _logits(model, text)),
            (" in another thread", pool.submit(_logits, model, text).result()),
        ):
            off = float(np.abs(found - eager).max() / eager.std())
            yield Finding.judged(
                f"CUDA graphs{where} against calls without",
                f"off by {off:.5f} of the spread, the same bits: {np.array_equal(found, eager)}",
                "at most 0.02",
                off <= 0.02,
            )


def check_exactness(open_fixed: Callable[[int | None], Model], vocab_size: int) -> Iterator[Finding]:
    """Measure the level that holds with calls as they come, and at a fixed width.

    Args:
        open_fixed: opens the target with so many rows in every call.
        vocab_size: ids that may be fed.
    """
    yield Finding("exactness, calls as they come", measure_exactness(open_fixed(None), vocab_size))
    model = open_fixed(FIXED_ROWS)
    level, trees = measure_exactness(model, vocab_size), model.takes_trees
    found = f"{level}, {'with' if trees else 'without'} trees"
    yield Finding.judged(f"exactness, {FIXED_ROWS} rows in every call", found, "bitwise", level == "bitwise")


def _logits(model: Model, text: list[int]) -> npt.NDArray[np.float32]:
    rows: list[npt.NDArray[np.float32]] = []
    for past in _PASTS:
        for count in _ROWS:
            model.cache.rollback(0)
            model.prefill(text[:past])
            rows += [np.array(row) for row in model.forward(text[past : past + count], range(count))]
    return np.stack(rows)
