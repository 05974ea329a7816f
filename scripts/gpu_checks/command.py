"""The command line of ``scripts/gpu_check``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.check import Check, Finding, run_checks, table
from gpu_checks.pair import TINY, Pairs, make_pairs
from gpu_checks.parity import check_parity
from gpu_checks.speed import check_texts, check_widths
from random_checkpoint import SIZES

import edge_spec
from edge_spec.manifest import Manifest
from edge_spec.runtime import engine as engines
from edge_spec.runtime.model import Model
from edge_spec.runtime.provider import CPU_PROVIDER, CUDA_PROVIDER, cuda_failure

_CONTEXT = 2048
# Seconds after which no check is begun any more.
_SECONDS = 330.0


def main() -> int:
    """Run the checks, print the table, and return 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=(TINY, *SIZES), default="1.5b", help="shapes of the random target (1.5b)")
    parser.add_argument("--target", help="a checkpoint to take instead")
    parser.add_argument("--draft", help="the draft of that checkpoint")
    parser.add_argument("--rehearse", action="store_true", help="let the CPU provider stand in for the GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    arguments = parser.parse_args()
    failure = None if arguments.rehearse else cuda_failure()
    if failure is not None:
        sys.exit(f"CUDA does not run here: {failure} (--rehearse tries the script without.)")
    tell = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="edge-spec-gpu-") as folder:
        pairs = make_pairs(Path(folder), arguments.size, arguments.target, arguments.draft, tell)
        providers = [CPU_PROVIDER] if arguments.rehearse else [CUDA_PROVIDER, CPU_PROVIDER]
        findings = list(run_checks(_checks(pairs, providers), _SECONDS, tell))
    if arguments.json is not None:
        body = {"rehearsal": arguments.rehearse, "findings": [finding.to_dict() for finding in findings]}
        arguments.json.write_text(json.dumps(body, indent=1))
    print(table(findings))
    if arguments.rehearse:
        print("This was a rehearsal on the CPU: nothing here was seen on a GPU.")
    return int(any(finding.verdict == "fails" for finding in findings))
