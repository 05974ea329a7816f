"""``edge-spec inspect``: shows what is in a bundle."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import add_command, named_path

if TYPE_CHECKING:
    from edge_spec.manifest import Manifest


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "inspect",
        "show what is in a bundle",
        "Show what a bundle holds: architecture, recipes, sizes, how close the graphs are to float32, file hashes.",
        "edge-spec inspect coder.pair",
        "edge-spec inspect coder.pair --json | jq .target.quality",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(command=_inspect)


def print_manifest(path: Path, manifest: Manifest, as_json: bool) -> None:
    """Print what the bundle at ``path`` says of itself, for a person or as JSON."""
    from edge_spec.inspection import describe_bundle

    print(json.dumps(manifest.to_json(), indent=1) if as_json else describe_bundle(path, manifest))


def _inspect(arguments: argparse.Namespace) -> int:
    from edge_spec.bundle import read_manifest

    print_manifest(arguments.bundle, read_manifest(arguments.bundle), arguments.json)
    return 0
