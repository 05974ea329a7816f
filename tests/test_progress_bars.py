"""Progress where no bar can be drawn."""

from __future__ import annotations

import pytest

from edge_spec import progress_bars
from edge_spec.progress_bars import ProgressBars


def test_a_log_is_told_by_lines_how_far_a_stage_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bars, "_LINE_SECONDS", 0.0)
    with ProgressBars() as progress:
        progress("writing texts", 1000, 5000)
        progress("writing texts", 5000, 5000)
        assert capsys.readouterr().err.splitlines() == [
            "writing texts: 1,000 of 5,000",
            "writing texts: 5,000 of 5,000",
        ]


def test_short_work_tells_a_log_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as progress:
        progress("load", 0, 1)
        progress("load", 1, 1)
        assert capsys.readouterr().err == ""
