"""A check, what it found, and how it is told."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any, Literal

Verdict = Literal["holds", "fails", "measured", "not run"]


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        what: was looked at.
        found: the number, or in words.
        wanted: what it should be; empty where it is only measured.
        verdict: whether it is.
        details: everything behind the number, ready for JSON.
    """

    what: str
    found: str
    wanted: str = ""
    verdict: Verdict = "measured"
    details: Any = None

    @classmethod
    def judged(cls, what: str, found: str, wanted: str, holds: bool, details: Any = None) -> Finding:
        """A finding that is as it should be, or not."""
        return cls(what, found, wanted, "holds" if holds else "fails", details)

    def unjudged(self) -> Finding:
        """The same as a mere measurement: what a speed is worth in a rehearsal."""
        return replace(self, verdict="measured")

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]], seconds: float, tell: Callable[[str], None]) -> Iterator[Finding]:
    """Run checks one after the other, whatever becomes of each.

    Args:
        checks: their names, and what runs them.
        seconds: none is begun later than this.
        tell: told what is being done.
    """
    started = monotonic()
    for name, check in checks:
        passed = monotonic() - started
        if passed > seconds:
            yield Finding(name, f"{passed:.0f} s had passed", verdict="not run")
            continue
        tell(f"{passed:5.0f} s  {name}")
        try:
            yield from check()
        except Exception as error:  # the rest is still worth knowing
            yield Finding(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", verdict="fails")
            tell(traceback.format_exc())


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, in columns."""
    rows = [(finding.verdict, finding.what, finding.found, finding.wanted) for finding in findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}"
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
