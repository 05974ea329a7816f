"""The memory that the pair recipes in ``models/`` are expected to take, by the laws of docs/memory.md.

    python benchmarks/recipe_memory.py           # write [memory] into every recipe
    python benchmarks/recipe_memory.py --check   # exit with 1 if one of them does not say what the laws say

Nothing is measured: the sizes are those of ``edge_spec/export/model_sizes.toml``, and what a bundle of such models
takes is what ``edge-spec plan`` would predict for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge_spec.export.pair_recipe import DEVICES_GB, PairRecipe, read_pair_recipe
from edge_spec.export.planned_bundle import planned_manifest
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_budget import DEFAULT_SHARE
from edge_spec.runtime.memory_plan import MemoryPlan

MODELS = Path(__file__).parent.parent / "models"

# What the system keeps of a device's memory. Of the rest an engine takes its default share.
SYSTEM_BYTES = 1 << 30
KV_TYPES = {"target": ("float32", "int8"), "draft": ("float32", "int8")}

_COMMENT = "# Computed by benchmarks/recipe_memory.py from the models' sizes; not measured."


def memory_section(pair: PairRecipe) -> str:
    """Return the section ``[memory]`` of a recipe."""
    manifest = planned_manifest(pair)
    whole = plan_memory(manifest, None, kv_types=KV_TYPES)
    lines = [
        _COMMENT,
        "[memory]",
        f"context = {whole.configuration.context}",
        f"peak_mib = {_mib(whole)}",
        "",
        "[memory.devices]",
    ]
    for size in DEVICES_GB:
        plan = plan_memory(manifest, int(DEFAULT_SHARE * ((size << 30) - SYSTEM_BYTES)), kv_types=KV_TYPES)
        if plan.fits:
            has = plan.configuration
            lines.append(
                f"{size} = {{ context = {has.context}, draft = {str(has.draft).lower()}, "
                f'kv = "{has.target_kv}", peak_mib = {_mib(plan)} }}'
            )
    return "\n".join(lines) + "\n"


def _mib(plan: MemoryPlan) -> int:
    return -(-plan.total_bytes >> 20)


def main() -> int:
    """Write or check the sections, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a recipe is out of date")
    check = parser.parse_args().check
    stale = []
    for path in sorted(MODELS.glob("*.toml")):
        text = path.read_text("utf-8")
        current = text.split(_COMMENT)[0].rstrip() + "\n\n" + memory_section(read_pair_recipe(path))
        if current != text:
            stale.append(path.name)
            if not check:
                path.write_text(current, "utf-8")
    if stale:
        print("out of date" if check else "written", *stale)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
