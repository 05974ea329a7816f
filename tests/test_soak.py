"""A shorter version of the soak: many disturbed requests, no wrong token, no growth of memory, no deadlock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edge_spec
from edge_spec.export import export_pair
from soak import FATES, Soak


@pytest.mark.timeout(900)
def test_disturbed_requests_leave_no_trace(
    real_weights: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = tmp_path_factory.mktemp("soak") / "smollm2"
    export_pair(real_weights("smollm2"), None, bundle)
    with edge_spec.load(bundle, context=256, conversations=2) as engine:
        soak = Soak(engine, seed=1, longest=8)
        soak.run(200, every=5)
    report = soak.report
    assert not report.wrong, report.wrong[:3]
    assert {fate.partition(":")[0] for fate in report.fates} == FATES.keys()
    assert sum(report.fates.values()) == 200
    assert report.growth < 0.02
