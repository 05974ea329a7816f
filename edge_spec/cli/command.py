"""One command of the command line: its help, and the options that commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# What the engine calls the options of a request, as far as commands share them.
REQUEST_OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "banned_token_ids",
    "speculation",
    "max_draft",
    "verification",
    "tree",
)


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
        metavar="float32|float16|int8",
        help="store the target's keys and values so (as the model computes; int8 before the context gets shorter)",
    )
    add_drafter_option(machine)
    return machine


def add_drafter_option(parser: argparse._ActionsContainer) -> None:
    """Add which drafter with a network of its own is loaded."""
    parser.add_argument(
        "--drafter",
        metavar="auto|head|model|none",
        help="load the bundle's head, its draft model, or neither (the one that gains more speed for its memory)",
    )


def add_exactness_option(machine: argparse._ArgumentGroup) -> None:
    """Add which exactness is owed to what commands ask of the machine."""
    machine.add_argument(
        "--exactness",
        metavar="bitwise|distribution",
        help="bitwise: drafting changes no bit, or loading fails; distribution: do not measure (what holds by itself)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add how tokens are chosen and where a text ends, and return the group of options."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="stop after so many tokens (256)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token (0)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens; 0: all (0)")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of mass P (1)")
    sampling.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest's (0)")
    sampling.add_argument("--seed", type=int, metavar="S", help="same seed, same text, drafted or not (random)")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; can be repeated")
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: tokens of prompt and answer get less likely (1)"
    )
    sampling.add_argument(
        "--presence-penalty", type=float, metavar="P", help="lower the logits of the answer's tokens by P (0)"
    )
    sampling.add_argument("--frequency-penalty", type=float, metavar="P", help="by P for each time they occur (0)")
    sampling.add_argument(
        "--ban-token",
        type=int,
        action="append",
        dest="banned_token_ids",
        metavar="ID",
        help="never emit this token; can be repeated",
    )
    return sampling


def add_speculation_options(parser: argparse.ArgumentParser, grammar: bool = False) -> None:
    """Add who drafts, with what a grammar forces if there can be one; how much, and what is kept."""
    others = "model, head, grammar" if grammar else "model, head"
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--speculation",
        metavar="auto|off|NAME",
        help=f"who drafts: suffix, recycling, lookup, {others}, free or composite (auto: whoever is worth its time)",
    )
    speculation.add_argument(
        "--max-draft",
        type=int,
        metavar="N",
        help="most tokens drafted per target call, with a NAME whatever they cost (as many as pay)",
    )
    speculation.add_argument(
        "--no-tree",
        dest="tree",
        action="store_const",
        const=False,
        help="draft one continuation at a time, without alternatives",
    )
    speculation.add_argument(
        "--verification",
        metavar="coupled|token|block|traversal",
        help="which drafted tokens are kept (coupled); with the others, sampled text follows the same distribution, "
        "but depends on who drafts",
    )


def named_path(text: str) -> Path:
    """Read a path. An empty one, as an unset variable of a shell leaves, would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty, expected one; '.' is the folder you are in")
    return Path(text)


def model_name(text: str) -> str:
    """Read what may be a path or a name on the hub. An empty one would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty, expected a path or a name")
    return text


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that were given; those that were not keep the defaults of the function they go to."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


class _Formatter(argparse.HelpFormatter):
    """Wraps the description, but keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)
