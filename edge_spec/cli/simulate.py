"""``edge-spec simulate``: predicts what speculation would bring on a device that is not here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import add_command, given, model_name

if TYPE_CHECKING:
    from edge_spec.manifest import Manifest

EXIT_DOES_NOT_FIT = 1


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "simulate",
        "predict what speculation would bring on a Jetson",
        "Predict how a pair would do on a device that is not here: whether it fits, how fast plain decoding would be, "
        "and within which range speculation would be faster. Published figures of the device and the sizes of the "
        "models give the costs of calls; the controller and the memory plan are the real ones, and the texts are made "
        "up. Nothing is measured, and no weights are needed. The exit status is "
        f"{EXIT_DOES_NOT_FIT} where the pair fits none of the devices.",
        "edge-spec simulate qwen2.5-coder-7b --on orin-nano",
        "edge-spec simulate coder.pair --on all --kernels rows",
        "edge-spec simulate qwen3-4b --on thor --json | jq '.[0].tasks'",
    )
    parser.add_argument("pair", type=model_name, metavar="PAIR", help="a bundle, or the name or file of a pair recipe")
    parser.add_argument(
        "--on",
        action="append",
        metavar="DEVICE",
        help="orin-nano, orin-nx, agx-orin, thor, or all of them; can be repeated (all)",
    )
    parser.add_argument(
        "--kernels",
        choices=("batched", "rows"),
        help="how several rows are multiplied by int4 weights: batched, as ONNX Runtime does from 1.28 on, or row by "
        "row, as in the wheels for JetPack 6 (batched)",
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of context to keep in any case (up to 4096)")
    parser.add_argument("--tokens", type=int, metavar="N", help="length of the answers (256)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the texts that are made up (0)")
    parser.add_argument("--json", action="store_true", help="print a JSON list, an object for each device")
    parser.set_defaults(command=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from edge_spec.simulation.device_class import device_classes, find_device
    from edge_spec.simulation.prediction import predict
    from edge_spec.simulation.report import describe_predictions

    wanted = arguments.on or ["all"]
    devices = [*device_classes().values()] if "all" in wanted else [find_device(name) for name in dict.fromkeys(wanted)]
    manifest = _manifest(arguments.pair)
    options = given(arguments, "kernels", "context", "tokens", "seed")
    predictions = [predict(manifest, device, **options) for device in devices]
    if arguments.json:
        print(json.dumps([prediction.to_json() for prediction in predictions], indent=1))
    else:
        print(describe_predictions(arguments.pair, predictions))
    return 0 if any(prediction.plan.fits for prediction in predictions) else EXIT_DOES_NOT_FIT


def _manifest(pair: str) -> Manifest:
    """What a bundle says of itself, or what the sizes of a recipe's models say of one that was never exported."""
    if Path(pair).is_dir():
        from edge_spec.bundle import read_manifest

        return read_manifest(Path(pair))
    from edge_spec.export.planned_bundle import planned_manifest
    from edge_spec.export.shipped_recipes import find_pair_recipe

    return planned_manifest(find_pair_recipe(pair), "cuda")
