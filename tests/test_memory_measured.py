"""What a plan predicts against what a process takes that is held to it, on real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.export import export_pair

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
def test_a_real_model_stays_within_its_plan_and_close_to_it(
    real_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "smollm2"
    export_pair(real_weights("smollm2"), None, bundle, check=False)
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), str(bundle), "--context", "1024", "--json"]
    for budget in ("320MiB", "360MiB"):
        command += ["--budget", budget]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Beside other tests a peak was once seen higher. What exceeds its budget twice in a row does so by itself.
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(done.stdout)
    assert len(rows) == 2
    for row in rows:
        planned, peak = row["plan"]["total_bytes"], row["peak_rss_bytes"]
        # Resident, not proportional: how much of the libraries others have mapped as well is no matter of the plan.
        assert 0.9 * planned < peak < row["budget_bytes"]
        assert row["tokens"]["answer"] == 160
