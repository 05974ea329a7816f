"""A shorter version of the server's soak: right answers, nobody stuck, no growth of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serve_soak import soak


def test_clients_that_leave_disturb_nobody(tiny_bundle: Callable[..., Path]) -> None:
    report = soak(tiny_bundle(), seconds=10, clients=64)
    assert not report.wrong, report.wrong[:3]
    assert {"answered", "left in the middle"} <= report.fates.keys()
    assert report.left == 0 and report.status == 0
    assert report.growth < 0.2  # beginning is still a large part of the time
    assert report.health_seconds
