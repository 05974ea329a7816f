"""Whether a pair stays within its memory plan: predicted against measured, under a real limit.

For every budget a process of its own loads the bundle as planned, reads a long prompt and generates to the end of the
context with the widest proposals, in a control group whose limit is the budget. Without control groups its data
segment is limited instead (RLIMIT_DATA). Meanwhile its resident memory is sampled: PSS, where what processes share
counts a share for each, and the kernel's own peak of RSS, where it counts in full.

    python benchmarks/memory.py BUNDLE [--budget 300MiB --budget 400MiB ...] [--context 1024] [--profile] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from edge_spec.bundle import read_manifest
from edge_spec.byte_size import parse_size, size_text
from edge_spec.runtime.int8_cache import cache_types
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_profile import read_profile

GROUPS = Path("/sys/fs/cgroup")
INTERVAL = 0.1

# Repeats itself, so that proposals are as wide as they may be.
TEXT = (
    "The first runner passes the baton to the second, the second passes the baton to the third, and the third, who has "
    "waited in the rain since {hour} o'clock, carries it past {place} to the finish. "
)
PLACES = ("the mill", "the old bridge", "a row of poplars", "the harbour", "the school", "a vineyard", "the quarry")
GENERATED = 160


def main() -> None:
    """Measure every budget, print a table or JSON, and fail if a budget was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--budget", action="append", help="may be repeated; by default five, from the least that fits")
    parser.add_argument("--context", type=int)
    parser.add_argument("--profile", action="store_true", help="plan with what an earlier load measured, if any did")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        generate(arguments.bundle, json.loads(arguments.child))
        return
    manifest = read_manifest(arguments.bundle)
    profile = read_profile(manifest) if arguments.profile else None
    budgets = [parse_size(budget, "--budget") for budget in arguments.budget or ()]
    budgets = budgets or default_budgets(manifest, arguments.context, profile)
    rows = []
    for budget in budgets:
        plan = plan_memory(
            manifest, budget, arguments.context, kv_types=cache_types(manifest), profile=profile
        ).require_fit()
        measured = measure(arguments.bundle, budget, arguments.context, arguments.profile)
        rows.append({"budget_bytes": budget, "plan": plan.to_json(), **measured})
        if not arguments.json:
            print_row(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=1))
    if any(row["exit_status"] or row["peak_rss_bytes"] > row["budget_bytes"] for row in rows):
        sys.exit("a budget was exceeded")


def default_budgets(manifest: Any, context: int | None, profile: Any) -> list[int]:
    """The least that fits, and then every time what the next better plan needs, up to five of them evenly spread."""
    kv_types = cache_types(manifest)
    plan = plan_memory(manifest, 1, context, kv_types=kv_types, profile=profile)
    budgets = [plan.total_bytes]
    while True:
        plan = plan_memory(manifest, budgets[-1], context, kv_types=kv_types, profile=profile)
        if plan.next_larger is None:
            break
        budgets.append(plan.next_larger.budget_bytes)
    return [budgets[round(index * (len(budgets) - 1) / 4)] for index in range(5)] if len(budgets) > 5 else budgets


def measure(bundle: Path, budget: int, context: int | None, profiles: bool) -> dict[str, Any]:
    """Run a process within the budget; return its exit status and peaks in bytes."""
    command = [sys.executable, __file__, str(bundle), "--child", json.dumps({"budget": budget, "context": context})]
    with limited_group(budget) as group, tempfile.TemporaryDirectory() as cache:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            else:
                resource.setrlimit(resource.RLIMIT_DATA, (budget, budget))

        environment = os.environ if profiles else {**os.environ, "EDGE_SPEC_CACHE": cache}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, env=environment)
        pss = rss = 0
        while child.poll() is None:
            pss = max(pss, field(f"/proc/{child.pid}/smaps_rollup", "Pss:"))
            rss = max(rss, field(f"/proc/{child.pid}/status", "VmHWM:"))
            sleep(INTERVAL)
        output = child.stdout.read() if child.stdout else ""
    tokens = json.loads(output) if child.returncode == 0 else None
    return {"exit_status": child.returncode, "peak_pss_bytes": pss, "peak_rss_bytes": rss, "tokens": tokens}


@contextmanager
def limited_group(budget: int) -> Iterator[Path | None]:
    """A control group with a limit, removed at the end; ``None`` where none can be made."""
    version_1 = (GROUPS / "memory" / "memory.limit_in_bytes").exists()
    group = (GROUPS / "memory" if version_1 else GROUPS) / f"edge-spec-memory-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        if limit.exists():
            limit.write_text(str(budget))
        yield group if limit.exists() else None
    finally:
        group.rmdir()


def field(file: str, name: str) -> int:
    """Bytes behind a name in a file of the kernel's; 0 if the process has ended."""
    try:
        lines = Path(file).read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


class KnownAnswer:
    """Proposes what the target is known to say, as much of it as a round may have: every row is then needed."""

    name = "known"
    memory_bytes = 0

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def propose(self, context: Any, budget: Any, prefix: Sequence[int] = ()) -> Any:
        """The next tokens of the text."""
        from edge_spec import Proposal

        start = len(context.tokens) + len(prefix)
        return Proposal(tuple(self._text[start : start + budget.tokens]))

    def observe(self, outcome: Any) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Nothing to forget."""


def generate(bundle: Path, limits: dict[str, Any]) -> None:
    """In the limited process: load as planned, and generate to the end of the context."""
    import edge_spec

    budget, context = limits["budget"], limits["context"]
    with edge_spec.load(bundle, memory_budget=budget, context=context) as engine:
        planned = engine.plan.configuration
        texts = (TEXT.format(hour=1 + index % 12, place=PLACES[index % 7]) for index in range(planned.context // 20))
        prompt = engine._tokenizer.encode("".join(texts))
        prompt = prompt[: planned.context - min(GENERATED, planned.context // 2)]
        # A penalty, so that logits, what it makes of them, and what is sampled from are there at once.
        options: dict[str, Any] = {
            "max_new_tokens": planned.context - len(prompt),
            "banned_token_ids": list(engine.manifest.eos_token_ids),
            "temperature": 0.3,
            "seed": 1,
            "repetition_penalty": 1.05,
        }
        # With the draft model, or whoever is worth it; then the same text in the widest proposals.
        named = "head" if planned.head else "model" if planned.draft else None
        drafter = {} if named is None else {"speculation": named, "max_draft": min(4, planned.widest)}
        first = engine.generate(prompt, **drafter, **options)
        engine.add_drafter(KnownAnswer([*prompt, *first.token_ids]))
        second = engine.generate(prompt, speculation="known", max_draft=planned.widest, **options)
    accepted = second.statistics.accepted
    print(json.dumps({"prompt": len(prompt), "answer": len(first.token_ids), "accepted": accepted}))


def print_row(row: dict[str, Any]) -> None:
    """Print one budget's result."""
    has, total = row["plan"]["configuration"], row["plan"]["total_bytes"]
    draft = f"draft {has['draft_window']}" if has["draft"] else "no draft"
    outcome = "ok" if row["exit_status"] == 0 else f"FAILED ({row['exit_status']})"
    print(
        f"budget {size_text(row['budget_bytes']):>9}  planned {size_text(total):>9}  "
        f"PSS {size_text(row['peak_pss_bytes']):>9} ({row['peak_pss_bytes'] / total:.3f})  "
        f"RSS {size_text(row['peak_rss_bytes']):>9} ({row['peak_rss_bytes'] / total:.3f})  "
        f"context {has['context']} in {has['target_kv']}, {draft}, widest {has['widest']}  {outcome} {row['tokens']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
