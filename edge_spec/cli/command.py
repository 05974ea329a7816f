"""One command of the command line: its help, and the options that commands share."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(commands: Any, name: str, summary: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """Add a command to the parser, with at least one example in its help."""
    heading = "example" if len(examples) == 1 else "examples"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="\n".join([f"{heading}:", *(f"  {example}" for example in examples)]),
        formatter_class=_Formatter,
    )
    return parser


def add_machine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what commands that load a bundle ask of the machine, and return the group of options."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda", help="what to run on (auto: what the bundle is for)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (all physical cores)")
    machine.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens of prompt and answer together (4096 or the model's limit, less where memory is short)",
    )
    machine.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="most memory to take, such as 2GiB or 50%%; 'edge-spec plan' shows what fits (80%% of what is free)",
    )
    machine.add_argument(
        "--kv",
        metavar="float32|int8",
        help="store the target's keys and values so (as the model computes; int8 before the context gets shorter)",
    )
    return machine


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that were given; those that were not keep the defaults of the function they go to."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


class _Formatter(argparse.HelpFormatter):
    """Wraps the description, but keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)
