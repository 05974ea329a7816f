"""``edge-spec plan``: says what a bundle will take, and what fits a budget, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from edge_spec.cli.command import add_command, add_drafter_option, named_path

EXIT_DOES_NOT_FIT = 1


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "plan",
        "show how a bundle fits a memory budget",
        "Predict the peak memory of a bundle item by item, and find the best way to load it within a budget: with how "
        "much context, with the draft model, the head or neither, with how wide a proposal. Nothing is loaded. The "
        f"exit status is {EXIT_DOES_NOT_FIT} where not even the smallest way fits.",
        "edge-spec plan coder.pair",
        "edge-spec plan coder.pair --budget 2GiB",
        "edge-spec plan coder.pair --budget 1800MiB --budget 2GiB --budget 3GiB",
        "edge-spec plan coder.pair --budget 50% --context 8192 --json | jq .total_bytes",
        "edge-spec plan coder-cuda.pair --gpu unified --budget 6GiB",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument(
        "--budget",
        action="append",
        metavar="SIZE",
        help="most memory to take, such as 2GiB, 800MB, or 50%% of what is free; can be repeated (80%%)",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of context to keep in any case (up to 4096, less if need be)"
    )
    parser.add_argument(
        "--conversations", type=int, metavar="N", help="texts of a whole context to keep at once, if they fit (1)"
    )
    parser.add_argument(
        "--kv", metavar="float32|float16|int8", help="store the target's keys and values so in any case (as in 'run')"
    )
    parser.add_argument(
        "--gpu",
        choices=("unified", "discrete"),
        help="for a bundle for CUDA: plan for a GPU that shares the machine's memory (Jetson), or for one with memory "
        "of its own, which the budget is then about (what is here, else unified)",
    )
    add_drafter_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, or a list of them for many budgets")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from edge_spec.bundle import read_manifest
    from edge_spec.cli.command import given
    from edge_spec.errors import RequestError
    from edge_spec.runtime.calibration_cache import kept_calibrations
    from edge_spec.runtime.device_memory import find_gpu
    from edge_spec.runtime.free_memory import available_memory
    from edge_spec.runtime.int8_cache import cache_types
    from edge_spec.runtime.memory import plan_memory
    from edge_spec.runtime.memory_budget import is_share
    from edge_spec.runtime.memory_pools import pools_elsewhere, pools_here
    from edge_spec.runtime.memory_profile import read_profile

    manifest = read_manifest(arguments.bundle)
    profile = read_profile(manifest)
    if arguments.gpu is not None and manifest.device == "cpu":
        raise RequestError(f"--gpu is about bundles for CUDA, but {arguments.bundle} is for the CPU; leave it out.")
    pools = pools_here(manifest, available_memory, find_gpu)
    here = pools.gpu is not None and arguments.gpu in (None, pools.kind)
    absent = manifest.device == "cuda" and not here
    if absent:
        pools = pools_elsewhere(arguments.gpu or pools.kind)
    for budget in (arguments.budget or ()) if absent else ():
        if is_share(budget):
            raise RequestError(
                f"--budget is {budget!r}, a share of what is free, but that GPU is not here to tell; give a size such "
                "as 4GiB."
            )
    budgets = [pools.budgets(budget, "--budget") for budget in arguments.budget or [None]]
    wishes = given(arguments, "context", "conversations", "drafter")
    kv_types = cache_types(manifest, arguments.kv)
    kept = [] if absent or manifest.head is None else kept_calibrations(manifest)
    plans = [
        plan_memory(
            manifest,
            budget,
            **wishes,
            kv_types=kv_types,
            profile=profile,
            pools=pools.kind,
            host_budget=host_budget,
            kept=kept,
        )
        for budget, host_budget in budgets
    ]
    if arguments.json:
        bodies = [plan.to_json() for plan in plans]
        print(json.dumps(bodies[0] if len(bodies) == 1 else bodies, indent=1))
    else:
        print("\n\n".join(f"{arguments.bundle}: {plan}" for plan in plans))
        if manifest.device == "cuda":
            print(f"\nthat GPU: {pools.gpu or 'none here, so what is free on it is not known'}")
    return 0 if all(plan.fits for plan in plans) else EXIT_DOES_NOT_FIT
