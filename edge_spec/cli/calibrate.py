"""``edge-spec calibrate``: shows what calls of a bundle's models cost."""

from __future__ import annotations

import argparse
import json
from typing import Any

from edge_spec.cli.command import add_command, add_machine_options, given, named_path
from edge_spec.cli.measuring import measuring
from edge_spec.errors import RequestError

IMAGES = (".png", ".svg", ".pdf")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "calibrate",
        "show what calls of a bundle's models cost on this machine",
        "Show what the target needs for several rows at once, what the draft model or the head needs for a step, "
        "and how often it is right. That is measured when a bundle is first loaded on a machine, in a few seconds, and "
        "kept in $EDGE_SPEC_CACHE (~/.cache/edge-spec/calibration); generating uses it to decide how much to draft.",
        "edge-spec calibrate coder.pair",
        "edge-spec calibrate coder.pair --fresh --threads 2 --plot costs.png",
        "edge-spec calibrate coder.pair --json | jq .verify_seconds",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--plot", type=named_path, metavar="FILE", help="also draw the costs into an image, e.g. costs.png"
    )
    add_machine_options(parser)
    parser.set_defaults(command=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    import edge_spec
    from edge_spec.cost_report import costs_to_json, describe_costs, plot_costs

    if arguments.plot is not None:
        import matplotlib  # noqa: F401  # before anything is measured in vain

        if arguments.plot.suffix not in IMAGES:
            raise RequestError(f"--plot is {arguments.plot}, expected a file that ends in {', '.join(IMAGES)}.")
        if not arguments.plot.parent.is_dir():
            raise RequestError(f"--plot is {arguments.plot}, but there is no folder {arguments.plot.parent}.")
    options: dict[str, Any] = given(arguments, "device", "threads", "context", "memory_budget", "kv", "drafter")
    if arguments.fresh:
        options["calibration"] = "fresh"
    with measuring() as progress, edge_spec.load(arguments.bundle, **options, progress=progress) as engine:
        calibration, context = engine.calibration, engine.context
        drafter = "head" if engine.plan.configuration.head else "draft model"
    if arguments.json:
        print(json.dumps(costs_to_json(calibration, context)))
    else:
        print(describe_costs(calibration, context, drafter))
    if arguments.plot is not None:
        plot_costs(calibration, context, arguments.plot, drafter)
    return 0
