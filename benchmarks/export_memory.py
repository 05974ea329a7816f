"""What an export takes: random checkpoints of several depths, or of real sizes, exported under a memory limit.

By default models of the same width with more and more layers: their peaks should be the same. Each is exported by a
process of its own, whose anonymous memory (what cannot be given back) is sampled. With ``--limit``, which ``--size``
sets as well, it lives in a control group with that limit, in which the page cache counts too, or where there are none
has its data segment limited.

    python benchmarks/export_memory.py [--layers 2 --layers 4 ...] [--format gguf]
    python benchmarks/export_memory.py --size 7b [--format gguf] [--folder DIR]    # needs 25 GB there
    python benchmarks/export_memory.py --source CHECKPOINT --limit 4GB
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import field, limited_group
from random_checkpoint import SIZES, checkpoint_bytes, with_layers, write_checkpoint

from edge_spec.bundle import read_manifest
from edge_spec.byte_size import parse_size, size_text
from edge_spec.export import export_pair
from edge_spec.progress_bars import ProgressBars

LAYERS = (2, 4, 8, 16)
LIMITS = {"small": None, "1.5b": "4GB", "7b": "6GB"}
INTERVAL = 0.01


def main() -> None:
    """Export everything that was asked for, and print a line or a JSON object for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layers", type=int, action="append", help="may be repeated")
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--source", help="export this checkpoint instead of random ones")
    parser.add_argument("--recipe")
    parser.add_argument("--limit", help="memory the export may take, e.g. 4GB")
    parser.add_argument("--folder", type=Path, help="where checkpoints and bundles lie meanwhile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        with ProgressBars() as bars:
            export_pair(arguments.child[0], None, arguments.child[1], recipe=arguments.recipe, progress=bars)
        return
    limit = arguments.limit or LIMITS[arguments.size]
    limit_bytes = None if limit is None else parse_size(limit, "--limit")
    facts = SIZES[arguments.size]
    depths = arguments.layers or (LAYERS if arguments.size == "small" else (facts.layers,))
    rows = []
    for layers in (None,) if arguments.source else depths:
        with tempfile.TemporaryDirectory(prefix="edge-spec-export-", dir=arguments.folder) as folder:
            if layers is None:
                source = arguments.source
            else:
                source = write(Path(folder), with_layers(facts, layers), arguments.format)
            rows.append({"layers": layers, **measure(source, Path(folder) / "bundle", arguments.recipe, limit_bytes)})
        if not arguments.json:
            print_row(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=1))
    if any(row["exit_status"] for row in rows):
        sys.exit("an export failed")


def write(folder: Path, facts: Any, kind: str) -> Path:
    """Write a random checkpoint, if there is room for it and for its bundle."""
    needed, free = 2 * checkpoint_bytes(facts), shutil.disk_usage(folder).free
    if needed > free:
        sys.exit(f"{folder} has {size_text(free)} left, but {size_text(needed)} are needed; choose another --folder")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    with ProgressBars() as bars:
        return write_checkpoint(checkpoint, facts, kind, lambda done, total: bars("random weights", done, total))


def measure(source: str | Path, bundle: Path, recipe: str | None, limit: int | None) -> dict[str, Any]:
    """Export in a process of its own; return its exit status, times in seconds and peaks in bytes."""
    command = [sys.executable, __file__, "--child", str(source), str(bundle)]
    command += ["--recipe", recipe] if recipe else []
    with limited_group(limit or 1 << 62) as group:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            elif limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        child = subprocess.Popen(command, preexec_fn=enter)
        anonymous = 0
        while child.poll() is None:
            anonymous = max(anonymous, field(f"/proc/{child.pid}/status", "RssAnon:"))
            time.sleep(INTERVAL)
        seconds, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = read_manifest(bundle) if child.returncode == 0 else None
    quality = None if manifest is None else manifest.target.quality
    return {
        "exit_status": child.returncode,
        "bundle_bytes": 0 if manifest is None else sum(file.bytes for file in manifest.files.values()),
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "peak_anonymous_bytes": anonymous,
        "mean_kl": None if quality is None else quality.mean_kl,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one export."""
    outcome = f"mean KL {row['mean_kl']:.4f}" if row["exit_status"] == 0 else f"FAILED ({row['exit_status']})"
    layers = "" if row["layers"] is None else f"{row['layers']:>3} layers  "
    print(
        f"{layers}bundle {size_text(row['bundle_bytes']):>9}  peak {size_text(row['peak_anonymous_bytes']):>9}  "
        f"{row['seconds']:6.1f} s, CPU {row['cpu_seconds']:6.1f} s  {outcome}",
        flush=True,
    )


if __name__ == "__main__":
    main()
