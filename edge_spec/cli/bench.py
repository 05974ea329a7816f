"""``edge-spec bench``: measures what speculation brings."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from edge_spec.cli.command import add_command, add_machine_options, given, named_path


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "bench",
        "measure what speculation brings on this machine",
        "Answer every prompt in several ways, one after the other, and compare them: speed against plain decoding with "
        "a 95% interval, acceptance, where the time goes, and whether the text is the same. Ctrl-C ends the run and "
        "reports what was measured until then.",
        "edge-spec bench coder.pair --per-category 2",
        "edge-spec bench coder.pair --prompts question.jsonl --per-category 10 --output spec-bench",
        "edge-spec bench coder.pair --replay log.jsonl --modes auto,lookup,model:max_draft=8 --json",
        "edge-spec bench coder-w8a8.pair --baseline coder-int4.pair --modes auto,auto@distribution",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument(
        "--modes",
        metavar="MODE,...",
        help="what to compare with 'off', plain decoding: auto or a drafter's name, with options and a level of "
        "exactness if wanted, as in model:max_draft=8:verification=block or auto@distribution (auto)",
    )
    parser.add_argument(
        "--baseline", type=named_path, metavar="BUNDLE", help="another bundle, decoded plainly, to compare with as well"
    )
    parser.add_argument("--output", type=named_path, metavar="DIR", help="write report.json, report.md and plots here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, raw records included")

    prompts = parser.add_argument_group("prompts")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        type=named_path,
        metavar="FILE",
        help="JSON lines with 'category' and 'turns', as in Spec-Bench (a small set that comes with edge-spec)",
    )
    source.add_argument(
        "--replay",
        type=named_path,
        metavar="FILE",
        help="your own log: JSON lines with 'prompt' (text, continued as it is), 'token_ids', 'messages' (a chat) or "
        "'turns'; its 'options', where a line has some, go before those given here",
    )
    prompts.add_argument("--category", action="append", metavar="NAME", help="only this one; can be repeated")
    prompts.add_argument("--per-category", type=int, metavar="N", help="so many prompts of each, spread evenly (all)")
    prompts.add_argument("--turns", type=int, metavar="N", help="turns of each prompt; plain answers lead on (1)")
    prompts.add_argument("--repeat", type=int, metavar="N", help="passes over the prompts, with fresh engines (1)")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="stop after so many tokens (128)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token (0)")
    sampling.add_argument("--seed", type=int, metavar="S", help="the first prompt's; each has the next one (0)")

    machine = add_machine_options(parser)
    machine.add_argument(
        "--exactness", metavar="bitwise|distribution", help="for modes that do not say (what holds by itself)"
    )
    machine.add_argument(
        "--shared-engine",
        action="store_true",
        help="load the bundle once for all modes, to save memory; a drafter that learns from answers then knows those "
        "of other modes",
    )
    parser.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from edge_spec.bench.runner import run_bench
    from edge_spec.bench.settings import Settings

    options = (
        "modes",
        "prompts",
        "replay",
        "category",
        "per_category",
        "turns",
        "repeat",
        "max_new_tokens",
        "temperature",
        "seed",
        "baseline",
        "device",
        "memory_budget",
        "kv",
        "drafter",
        "context",
        "threads",
        "exactness",
        "output",
    )
    settings = Settings(arguments.bundle, shared_engine=arguments.shared_engine, **given(arguments, *options))
    return run_bench(settings, shlex.join(["edge-spec", *arguments.words]), arguments.json)
