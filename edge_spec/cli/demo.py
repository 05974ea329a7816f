"""``edge-spec demo``: generates plainly and speculatively side by side."""

from __future__ import annotations

import argparse
from typing import Any

from edge_spec.cli.command import add_command, given, model_name, named_path


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        "generate plainly and speculatively side by side",
        "Export a small model once, then answer a few prompts twice, without and with speculation, and compare text "
        "and speed. Drafted tokens that were accepted are coloured.",
        "edge-spec demo",
        "edge-spec demo --model coder-0.5b.gguf --prompt 'Write a haiku about the sea.'",
    )
    parser.add_argument(
        "--model",
        type=model_name,
        metavar="MODEL",
        help="GGUF file, Hugging Face folder or hub id (the SmolLM2 of 'make demo')",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this instead; can be repeated")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (110)")
    parser.add_argument(
        "--cache", type=named_path, metavar="DIR", help="where the bundle is kept (~/.cache/edge-spec/bundles)"
    )
    parser.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from edge_spec.demo import run_demo

    return run_demo(**given(arguments, "model", "prompt", "max_new_tokens", "cache"))
