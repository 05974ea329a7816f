"""Shows how far a measurement is, when one takes place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_spec.progress_bars import ProgressBars


@contextmanager
def measuring() -> Iterator[Callable[[str, float], None]]:
    """Give a function to tell of stages and of which share of them is done; it shows bars from the first word on."""
    with ExitStack() as stack:

        @cache
        def bars() -> ProgressBars | None:
            try:
                from edge_spec.progress_bars import ProgressBars
            except ModuleNotFoundError:  # rich belongs to the export stage; measuring works without
                return None
            return stack.enter_context(ProgressBars(measuring=True))

        def report(stage: str, done: float) -> None:
            if (shown := bars()) is not None:
                shown.share(stage, done)

        yield report
