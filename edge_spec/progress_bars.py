"""Progress of long work, on stderr: one bar per stage on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# How often a log is told.
_LINE_SECONDS = 60.0


class ProgressBars:
    """A context manager to be passed as ``progress`` to an export, or around a measurement.

    Args:
        measuring: draw only when told of a step, since a thread that draws takes time from what is measured; and
            estimate the time that is left.
    """

    def __init__(self, measuring: bool = False) -> None:
        clocks: list[ProgressColumn] = [TimeElapsedColumn()]
        if measuring:
            clocks += [TextColumn("left:"), TimeRemainingColumn()]
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            *clocks,
            console=self._console,
            auto_refresh=not measuring,
            speed_estimate_period=600.0,  # seconds; answers may take long, and differ
        )
        self._measuring = measuring
        self._tasks: dict[str, TaskID] = {}
        self._line_at = time.monotonic()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tasks:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of ``stage`` are done."""
        if not self._tasks:
            self._progress.start()  # not before: without a bar it would print an empty line
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage)
        self._progress.update(self._tasks[stage], completed=done, total=total, refresh=self._measuring)
        if not self._console.is_terminal and time.monotonic() - self._line_at >= _LINE_SECONDS:
            self._line_at = time.monotonic()
            self._console.print(f"{stage}: {done:,} of {total:,}", markup=False)

    def share(self, stage: str, done: float) -> None:
        """Show which share of ``stage`` is done."""
        self(stage, round(100 * done), 100)
