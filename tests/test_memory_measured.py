"""What a plan predicts against what a process takes that is held to it, on real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.bundle import read_manifest
from edge_spec.export import export_pair
from edge_spec.export.add_head import add_head
from head_checkpoints import eagle3_tensors, llama_config, save_head

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
def test_a_real_model_stays_within_its_plan_and_close_to_it(
    real_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "smollm2"
    export_pair(real_weights("smollm2"), None, bundle, check=False)
    assert len(measured(bundle, "320MiB", "360MiB")) == 2


@pytest.mark.timeout(900)
def test_a_real_model_with_a_head_stays_within_its_plan_and_close_to_it(
    real_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    """The head is random, of a usual size, and asked in every round."""
    bundle = tmp_path / "smollm2"
    export_pair(real_weights("smollm2"), None, bundle, check=False)
    facts = read_manifest(bundle).target.architecture
    hidden, columns = facts.hidden_size, range(16384)
    sizes = {"mlp": facts.intermediate_size, "heads": facts.heads, "kv_heads": facts.kv_heads}
    tensors = eagle3_tensors(hidden, columns, facts.logits_size, head_size=facts.head_size, **sizes)
    config = llama_config(
        hidden,
        len(columns),
        facts.logits_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_size,
    )
    add_head(bundle, save_head(tmp_path / "head", config, tensors))
    (row,) = measured(bundle, "390MiB")
    assert row["plan"]["configuration"]["head"]


def measured(bundle: Path, *budgets: str) -> list[dict[str, Any]]:
    """Generate within each budget, and check what that took against what was planned."""
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), str(bundle), "--context", "1024", "--json"]
    for budget in budgets:
        command += ["--budget", budget]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Beside other tests a peak was once seen higher. What exceeds its budget twice in a row does so by itself.
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr + done.stdout
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    for row in rows:
        planned, peak = row["plan"]["total_bytes"], row["peak_rss_bytes"]
        # Resident, not proportional: how much of the libraries others have mapped as well is no matter of the plan.
        assert 0.9 * planned < peak < row["budget_bytes"]
        assert row["tokens"]["answer"] == 160
    return rows
