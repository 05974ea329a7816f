"""Progress of an export on a terminal: one bar per stage, on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressBars:
    """A context manager to be passed as ``progress`` to an export."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

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
        self._progress.update(self._tasks[stage], completed=done, total=total)
