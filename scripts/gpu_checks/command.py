"""The command line of ``scripts/gpu_check``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from random_checkpoint import SIZES

from edge_spec.runtime.memory_pools import pools_here
from edge_spec.runtime.provider import cuda_failure
from gpu_checks.capture import check_capture, check_exactness
from gpu_checks.check import Check, Finding, run_checks, table
from gpu_checks.drafting import check_drafting
from gpu_checks.machine import Machine, on_cpu
from gpu_checks.pair import TINY, Pairs, make_pairs
from gpu_checks.parity import check_parity
from gpu_checks.placement import check_features, check_nodes, check_plan, check_sharing
from gpu_checks.selection import check_selection
from gpu_checks.speed import check_texts, check_widths

# Seconds after which no check is begun any more.
_SECONDS = 330.0


def main() -> int:
    """Run the checks, print the table, and return 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Everything that only a GPU can show, in one run of a few minutes that ends with a table.",
        epilog="example: scripts/gpu_check --rehearse --size tiny",
    )
    parser.add_argument("--size", choices=(TINY, *SIZES), default="1.5b", help="shapes of the random target (1.5b)")
    parser.add_argument("--target", help="a checkpoint to take instead, whatever --size says")
    parser.add_argument("--draft", help="the draft of that checkpoint")
    parser.add_argument("--rehearse", action="store_true", help="let the CPU stand in for the GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    arguments = parser.parse_args()
    if arguments.draft is not None and arguments.target is None:
        parser.error("--draft is the draft of a --target: give both")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json is {arguments.json}, whose folder does not exist: make it first")
    failure = None if arguments.rehearse else cuda_failure()
    if failure is not None:
        sys.exit(f"CUDA does not run here: {failure} (--rehearse tries the script without.)")
    tell = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="edge-spec-gpu-") as folder:
        pairs = make_pairs(Path(folder), arguments.size, arguments.target, arguments.draft, tell)
        findings = list(run_checks(_checks(Machine(arguments.rehearse), pairs, Path(folder)), _SECONDS, tell))
    print(table(findings), flush=True)  # first, since it took minutes and may be all there is
    if arguments.json is not None:
        body = {"rehearsal": arguments.rehearse, "findings": [finding.to_dict() for finding in findings]}
        arguments.json.write_text(json.dumps(body, indent=1))
    if arguments.rehearse:
        print("This was a rehearsal on the CPU: nothing here was seen on a GPU.")
    return int(any(finding.verdict == "fails" for finding in findings))


def _checks(machine: Machine, pairs: Pairs, folder: Path) -> list[tuple[str, Check]]:
    """The checks, the most telling first."""
    bundle, columns = pairs.cuda, pairs.cuda.manifest.vocab_size
    target, draft = bundle.manifest.target, bundle.manifest.draft
    settings = machine.settings()
    target_of = partial(machine.model, bundle, target)
    pools = pools_here(bundle.manifest)
    judges = not machine.rehearses
    weights = sum(file.bytes for name, file in bundle.manifest.files.items() if name.startswith("target/"))

    def widths() -> Iterator[Finding]:
        yield from check_widths("without CUDA graphs", target_of(replace(settings, captures=False)), judges)
        if settings.captures:
            model = target_of()
            yield from check_widths("with CUDA graphs", model, judges)
            yield Finding("why calls run without CUDA graphs", model.eager_reason or "none do")

    def texts() -> Iterator[Finding]:
        with machine.engine(bundle) as engine:
            yield from check_texts(engine, judges)

    def drafting() -> Iterator[Finding]:
        if draft is not None:
            yield from check_drafting(machine.model(bundle, draft), bundle.manifest.usable_columns(draft))

    return [
        ("features", lambda: check_features(machine.features())),
        ("parity", lambda: check_parity(target_of(), on_cpu(bundle), on_cpu(pairs.exact), columns)),
        ("selection", lambda: check_selection(target_of(), columns)),
        ("capture", lambda: check_capture(target_of, settings, columns)),
        ("exactness", lambda: check_exactness(lambda rows: target_of(fixed_rows=rows), columns)),
        ("widths", widths),
        ("texts", texts),
        ("drafting", drafting),
        ("nodes", lambda: check_nodes(target_of, settings, folder, machine.provider)),
        ("sharing", lambda: check_sharing(target_of, settings, pools, weights)),
        ("plan", lambda: check_plan(lambda: machine.engine(bundle), pools)),
    ]
