"""How long-running exports tell somebody how far they are."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with a stage's name and how many of its steps are done; a stage is over when ``done == total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
