"""An export takes no more memory for more layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_peak_does_not_grow_with_the_layers(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "export_memory.py"), "--json", "--format", kind]
    command += ["--folder", str(tmp_path), "--recipe", "fp32", "--layers", "2", "--layers", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout)
    assert all(row["mean_kl"] is not None for row in (few, many))  # the check ran
    added = many["bundle_bytes"] - few["bundle_bytes"]
    assert added > 300e6
    assert many["peak_anonymous_bytes"] < few["peak_anonymous_bytes"] + 0.2 * added
    assert list(tmp_path.iterdir()) == []
