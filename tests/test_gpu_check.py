"""``scripts/gpu_check`` itself, rehearsed on the CPU: a GPU is at hand for minutes only, so it must not fail there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_spec.runtime.provider import cuda_failure

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    report = tmp_path_factory.mktemp("rehearsal") / "report.json"
    ran = run("--rehearse", "--size", "tiny", "--json", report)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, json.loads(report.read_text())


def test_a_rehearsal_runs_every_check_and_says_that_it_was_one(rehearsal: tuple[str, dict[str, Any]]) -> None:
    table, report = rehearsal
    assert report["rehearsal"] is True
    assert table.rstrip().endswith("nothing here was seen on a GPU.")
    verdicts = {finding["what"]: finding["verdict"] for finding in report["findings"]}
    assert "fails" not in verdicts.values()
    for what in (
        "probe: trees",
        "probe: shared_weights",
        "chain: CUDA against the CPU, same graph",
        "tree: CUDA against the CPU, same graph",
        "selection: the likeliest of each row",
        "CUDA graphs in another thread against calls without",
        "exactness, 8 rows in every call",
        "texts with and without drafting",
        "4 tokens in one call",
        "nodes of graph 0",
    ):
        assert verdicts[what] == "holds", what
        assert what in table


def test_speeds_of_a_rehearsal_are_not_judged(rehearsal: tuple[str, dict[str, Any]]) -> None:
    _, report = rehearsal
    verdicts = {finding["what"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["tokens per second"] == verdicts["without CUDA graphs: a call of k rows"] == "measured"
    assert verdicts["with CUDA graphs: a call of k rows"] == "measured"


@pytest.mark.skipif(cuda_failure() is None, reason="CUDA runs here")
def test_without_a_gpu_it_says_why_and_how_to_try_it() -> None:
    ran = run()
    assert ran.returncode == 1
    assert ran.stderr.startswith("CUDA does not run here: ")
    assert "--rehearse" in ran.stderr
