"""``edge-spec run``: streams the answer to a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import (
    REQUEST_OPTIONS,
    add_command,
    add_exactness_option,
    add_machine_options,
    add_sampling_options,
    add_speculation_options,
    given,
    named_path,
)
from edge_spec.cli.measuring import measuring
from edge_spec.errors import RequestError

if TYPE_CHECKING:
    from edge_spec.runtime.completion import Completion
    from edge_spec.runtime.grammar import Grammar

_REQUEST = (*REQUEST_OPTIONS, "logprobs")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "run",
        "generate text with a bundle",
        "Stream the answer to a prompt. The text goes to stdout, statistics go to stderr. The prompt is put into the "
        "model's chat template when the bundle has one. Speculation changes how fast the text comes, not what the "
        "model says: the same text at temperature 0, the same text for the same seed above.",
        "edge-spec run coder.pair 'Write a function that reverses a linked list.' --max-new-tokens 200",
        "git diff | edge-spec run coder.pair - --system 'Write a commit message for this diff.'",
        "edge-spec run coder.pair 'def fibonacci(n):' --raw --temperature 0.7 --seed 1 --json --logprobs 3",
        "edge-spec run coder.pair 'Which licence has this text?' --json-schema licence.json",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to answer, or - to read it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")

    sampling = add_sampling_options(parser)
    sampling.add_argument(
        "--logprobs", type=int, metavar="N", help="report log-probabilities, and the N likeliest tokens; needs --json"
    )

    form = parser.add_argument_group("form of the answer; needs pip install 'edge-spec[grammar]'")
    forms = form.add_mutually_exclusive_group()
    forms.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="JSON that obeys this JSON schema; {} allows any JSON"
    )
    forms.add_argument("--regex", metavar="PATTERN", help="text that this regular expression matches as a whole")
    forms.add_argument("--grammar", type=named_path, metavar="FILE", help="text of this grammar in Lark's syntax")

    add_speculation_options(parser, grammar=True)
    add_exactness_option(add_machine_options(parser))
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    import edge_spec
    from edge_spec.manifest import CHAT_TEMPLATE

    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs needs --json, which prints them with the text.")
    request = given(arguments, *_REQUEST)
    if (grammar := _grammar(arguments)) is not None:
        request["grammar"] = grammar
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt == "-" else arguments.prompt
    options = given(arguments, "device", "threads", "context", "memory_budget", "kv", "drafter", "exactness")
    with measuring() as progress:
        engine = edge_spec.load(arguments.bundle, **options, progress=progress)
    with engine:
        has_template = CHAT_TEMPLATE in engine.manifest.files
        if arguments.system is not None and (arguments.raw or not has_template):
            why = "--raw leaves it out" if has_template else "this bundle has none"
            raise RequestError(f"--system needs the chat template, but {why}. Put the text into the prompt instead.")
        if has_template and not arguments.raw:
            system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
            prompt = [*system, {"role": "user", "content": prompt}]
        level = engine.exactness
        completion = None
        for chunk in engine.stream(prompt, **request):
            completion = chunk.completion
            if not arguments.json:
                print(chunk.text, end="", flush=True)
    assert completion is not None
    if arguments.json:
        print(json.dumps({**completion.to_dict(), "exactness": level}, ensure_ascii=False))
    else:
        print()
        print(_statistics_text(completion), file=sys.stderr)
    return 0


def _grammar(arguments: argparse.Namespace) -> Grammar | None:
    """What the answer has to be, if anything."""
    from edge_spec import Grammar

    if arguments.json_schema is not None:
        text = arguments.json_schema
        if not text:
            raise RequestError("--json-schema is empty, expected a JSON schema or the path of one; {} allows any JSON.")
        return Grammar.json_schema(text if text.lstrip().startswith("{") else _read(Path(text), "--json-schema"))
    if arguments.regex is not None:
        return Grammar.regex(arguments.regex)
    if arguments.grammar is not None:
        return Grammar.lark(_read(arguments.grammar, "--grammar"))
    return None


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} names {path}, which cannot be read ({error}). Expected a text file.") from error


def _statistics_text(completion: Completion) -> str:
    counts = completion.statistics
    lines = [
        f"{counts.new_tokens} tokens at {counts.tokens_per_second:.1f} tokens/s, the first after "
        f"{counts.ttft_seconds:.2f} s for a prompt of {counts.prompt_tokens}; ended by {completion.finish_reason}"
        + (f"; seed {counts.seed}" if counts.seed is not None else "")
    ]
    if counts.drafted:
        lines.append(
            f"mean accepted length {counts.mean_accepted_length:.2f} over {counts.rounds} target calls; "
            f"{counts.accepted} of {counts.drafted} drafted tokens accepted ({counts.acceptance_rate:.0%})"
        )
        if counts.accepted:
            drafters = sorted(counts.accepted_by_drafter.items(), key=lambda item: -item[1])
            lines.append(f"accepted: {', '.join(f'{name} {tokens}' for name, tokens in drafters)}")
        lines.append(
            f"time: drafting {counts.draft_seconds:.2f} s, verifying {counts.verify_seconds:.2f} s, "
            f"overhead {counts.overhead_seconds:.2f} s"
        )
    return "\n".join(lines)
