"""The command line: export, run, bench, calibrate, inspect, demo.

Every command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from edge_spec import __version__
from edge_spec.errors import EdgeSpecError, QualityError, RequestError

if TYPE_CHECKING:
    from edge_spec.bundle import Manifest
    from edge_spec.runtime.completion import Completion

EXIT_QUALITY = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

RECIPES = ("int4", "int4-128", "w8a8", "fp16", "fp32")
IMAGES = (".png", ".svg", ".pdf")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: arguments without the program's name; those of the process if ``None``.
    """
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words, argparse.Namespace(words=words))
    try:
        with _ending_in_order():
            status: int = arguments.command(arguments)
            sys.stdout.flush()
    except EdgeSpecError as error:
        return _fail(str(error), EXIT_QUALITY if isinstance(error, QualityError) else EXIT_ERROR)
    except ModuleNotFoundError as error:
        # What 'run' needs is checked where it is imported; the rest belongs to the heavy stage.
        if error.name is None or error.name.startswith("edge_spec"):
            raise
        extra = "bench" if error.name == "matplotlib" else "export"
        return _fail(f"this needs the package {error.name!r}, which is not installed: pip install 'edge-spec[{extra}]'")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # Files of bundles and checkpoints have errors of their own; what is left is our output, on a full disk, say.
        _discard_output()
        return _fail(f"cannot read or write {error.filename or 'the standard streams'}: {error.strerror or error}")
    return status


def _fail(message: str, status: int = EXIT_ERROR) -> int:
    """Say what went wrong, if anybody can hear it, and return the exit status."""
    with suppress(OSError):
        print(f"edge-spec: error: {message}", file=sys.stderr)
    return status


def _prepare_streams() -> None:
    """See that standard streams exist, and that stdout takes any text, whatever its encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent; a file opened later would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Point stdout elsewhere, since Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """On SIGTERM and SIGHUP leave through every ``finally``, as on Ctrl-C: an export takes its unfinished folder along.

    Signals that somebody has arranged for already (``nohup``) are left to them.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        raise SystemExit(128 + number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        ours = []
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; the parsed ``command`` is the function to call with the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="edge-spec",
        description="Lossless speculative decoding for one user on a small machine.",
        epilog="'edge-spec COMMAND --help' explains a command and shows an example.",
        formatter_class=_CommandsFormatter,
    )
    parser.add_argument("--version", action="version", version=f"edge-spec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_export(commands)
    _add_run(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    _add_inspect(commands)
    _add_demo(commands)
    return parser


def _add_export(commands: Any) -> None:
    parser = _add_command(
        commands,
        "export",
        "turn a target and a draft model into a pair bundle",
        "Turn a target and, optionally, a small draft with the same tokenizer into one pair bundle: quantized ONNX "
        "graphs that 'edge-spec run' generates with. A model is a GGUF file, a Hugging Face folder or a hub id.",
        "edge-spec export --target coder-1.5b.gguf --draft coder-0.5b.gguf --output coder.pair",
        "edge-spec export --target HuggingFaceTB/SmolLM2-135M-Instruct --output smollm2.pair --recipe int4",
        "edge-spec export --pair models/qwen2.5-coder-1.5b.toml --output coder.pair",
    )
    parser.add_argument(
        "--pair", type=Path, metavar="FILE", help="TOML file that names the models and recipes; the options here win"
    )
    parser.add_argument("--target", metavar="MODEL", help="the model whose text is wanted; --pair can name it instead")
    parser.add_argument("--draft", metavar="MODEL", help="a much smaller model with the same tokenizer")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the bundle's folder")
    parser.add_argument("--recipe", choices=RECIPES, help="how the target is stored (cpu: w8a8, cuda: int4)")
    parser.add_argument("--draft-recipe", choices=RECIPES, help="how the draft is stored (cpu: int4-128, cuda: int4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the graphs run on (cpu)")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is already there")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with a float32 reference")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(command=_export, usage_error=parser.error)


def _add_run(commands: Any) -> None:
    parser = _add_command(
        commands,
        "run",
        "generate text with a bundle",
        "Stream the answer to a prompt. The text goes to stdout, statistics go to stderr. The prompt is put into the "
        "model's chat template when the bundle has one. Speculation changes how fast the text comes, not what the "
        "model says: the same text at temperature 0, the same text for the same seed above.",
        "edge-spec run coder.pair 'Write a function that reverses a linked list.' --max-new-tokens 200",
        "git diff | edge-spec run coder.pair - --system 'Write a commit message for this diff.'",
        "edge-spec run coder.pair 'def fibonacci(n):' --raw --temperature 0.7 --seed 1 --json --logprobs 3",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to answer, or - to read it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")

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
    sampling.add_argument(
        "--logprobs", type=int, metavar="N", help="report log-probabilities, and the N likeliest tokens; needs --json"
    )

    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--speculation",
        metavar="auto|off|model|lookup",
        help="which drafter guesses (auto: the draft model, or lookup without one)",
    )
    speculation.add_argument("--max-draft", type=int, metavar="K", help="most tokens drafted per round (4)")
    speculation.add_argument(
        "--verification",
        metavar="coupled|token|block|traversal",
        help="which drafted tokens are kept (coupled); with the others, sampled text follows the same distribution, "
        "but depends on who drafts",
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda", help="what to run on (auto: what the bundle is for)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (all physical cores)")
    machine.add_argument(
        "--context", type=int, metavar="N", help="most tokens of prompt and answer together (4096 or the model's limit)"
    )
    machine.add_argument(
        "--exactness",
        metavar="bitwise|distribution",
        help="bitwise: drafting changes no bit, or loading fails; distribution: do not measure (what holds by itself)",
    )
    parser.set_defaults(command=_run)


def _add_bench(commands: Any) -> None:
    parser = _add_command(
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
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument(
        "--modes",
        metavar="MODE,...",
        help="what to compare with 'off', plain decoding: auto or a drafter's name, with options and a level of "
        "exactness if wanted, as in model:max_draft=8:verification=block or auto@distribution (auto)",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="BUNDLE", help="another bundle, decoded plainly, to compare with as well"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write report.json, report.md and plots here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, raw records included")

    prompts = parser.add_argument_group("prompts")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'category' and 'turns', as in Spec-Bench (a small set that comes with edge-spec)",
    )
    source.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="your own log: JSON lines with 'prompt' (text, continued as it is), 'messages' (a chat) or 'turns'",
    )
    prompts.add_argument("--category", action="append", metavar="NAME", help="only this one; can be repeated")
    prompts.add_argument("--per-category", type=int, metavar="N", help="so many prompts of each, spread evenly (all)")
    prompts.add_argument("--turns", type=int, metavar="N", help="turns of each prompt; plain answers lead on (1)")
    prompts.add_argument("--repeat", type=int, metavar="N", help="passes over the prompts, with fresh engines (1)")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="stop after so many tokens (128)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token (0)")
    sampling.add_argument("--seed", type=int, metavar="S", help="the first prompt's; each has the next one (0)")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda", help="what to run on (auto: what the bundle is for)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (all physical cores)")
    machine.add_argument(
        "--context", type=int, metavar="N", help="most tokens of prompt and answer together (4096 or the model's limit)"
    )
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


def _add_calibrate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "calibrate",
        "show what calls of a bundle's models cost on this machine",
        "Show what the target needs for several rows at once, what the draft model needs for a step, and how often it "
        "is right. That is measured when a bundle is first loaded on a machine, in a few seconds, and kept in "
        "$EDGE_SPEC_CACHE (~/.cache/edge-spec/calibration); generating uses it to decide how much to draft.",
        "edge-spec calibrate coder.pair",
        "edge-spec calibrate coder.pair --fresh --threads 2 --plot costs.png",
        "edge-spec calibrate coder.pair --json | jq .verify_seconds",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the costs into an image, e.g. costs.png")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda", help="what to run on (auto: what the bundle is for)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (all physical cores)")
    machine.add_argument(
        "--context", type=int, metavar="N", help="most tokens of prompt and answer together (4096 or the model's limit)"
    )
    parser.set_defaults(command=_calibrate)


def _add_inspect(commands: Any) -> None:
    parser = _add_command(
        commands,
        "inspect",
        "show what is in a bundle",
        "Show what a bundle holds: architecture, recipes, sizes, how close the graphs are to float32, file hashes.",
        "edge-spec inspect coder.pair",
        "edge-spec inspect coder.pair --json | jq .target.quality",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(command=_inspect)


def _add_demo(commands: Any) -> None:
    parser = _add_command(
        commands,
        "demo",
        "generate plainly and speculatively side by side",
        "Export a small model once, then answer a few prompts twice, without and with speculation, and compare text "
        "and speed. Drafted tokens that were accepted are coloured.",
        "edge-spec demo",
        "edge-spec demo --model coder-0.5b.gguf --prompt 'Write a haiku about the sea.'",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="GGUF file, Hugging Face folder or hub id (the SmolLM2 of 'make demo')"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this instead; can be repeated")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (110)")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where the bundle is kept (~/.cache/edge-spec/bundles)"
    )
    parser.set_defaults(command=_demo)


def _add_command(commands: Any, name: str, summary: str, description: str, *examples: str) -> argparse.ArgumentParser:
    heading = "example" if len(examples) == 1 else "examples"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="\n".join([f"{heading}:", *(f"  {example}" for example in examples)]),
        formatter_class=_Formatter,
    )
    return parser


class _CommandsFormatter(argparse.HelpFormatter):
    """Counts the indentation of commands, which argparse forgets, so that a long name has its summary beside it."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


class _Formatter(argparse.HelpFormatter):
    """Wraps the description, but keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)


def _export(arguments: argparse.Namespace) -> int:
    if arguments.target is None and arguments.pair is None:
        arguments.usage_error("one of --target and --pair is required")
    from edge_spec.export.pair import export_pair
    from edge_spec.export.pair_recipe import read_pair_recipe
    from edge_spec.progress_bars import ProgressBars

    models = {"draft": None} if arguments.pair is None else vars(read_pair_recipe(arguments.pair))
    with ProgressBars() as progress:
        report = export_pair(
            **{**models, **_given(arguments, "target", "draft", "recipe", "draft_recipe")},
            output=arguments.output,
            device=arguments.device,
            check=not arguments.no_check,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    for note in report.notes:
        print(note, file=sys.stderr)
    _print_manifest(report.path, report.manifest, arguments.json)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    import edge_spec
    from edge_spec.bundle import CHAT_TEMPLATE

    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs needs --json, which prints them with the text.")
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt == "-" else arguments.prompt
    with edge_spec.load(arguments.bundle, **_given(arguments, "device", "threads", "context", "exactness")) as engine:
        has_template = CHAT_TEMPLATE in engine.manifest.files
        if arguments.system is not None and (arguments.raw or not has_template):
            why = "--raw leaves it out" if has_template else "this bundle has none"
            raise RequestError(f"--system needs the chat template, but {why}. Put the text into the prompt instead.")
        if has_template and not arguments.raw:
            system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
            prompt = [*system, {"role": "user", "content": prompt}]
        options = (
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
            "logprobs",
            "speculation",
            "max_draft",
            "verification",
        )
        level = engine.exactness
        completion = None
        for chunk in engine.stream(prompt, **_given(arguments, *options)):
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


def _calibrate(arguments: argparse.Namespace) -> int:
    import edge_spec
    from edge_spec.cost_report import costs_to_json, describe_costs, plot_costs

    if arguments.plot is not None:
        import matplotlib  # noqa: F401  # before anything is measured in vain

        if arguments.plot.suffix not in IMAGES:
            raise RequestError(f"--plot is {arguments.plot}, expected a file that ends in {', '.join(IMAGES)}.")
    options: dict[str, Any] = _given(arguments, "device", "threads", "context")
    if arguments.fresh:
        options["calibration"] = "fresh"
    with _measuring() as progress, edge_spec.load(arguments.bundle, **options, progress=progress) as engine:
        calibration, context = engine.calibration, engine.context
    if arguments.json:
        print(json.dumps(costs_to_json(calibration, context)))
    else:
        print(describe_costs(calibration, context))
    if arguments.plot is not None:
        plot_costs(calibration, context, arguments.plot)
    return 0


@contextmanager
def _measuring() -> Iterator[Callable[[str, float], None] | None]:
    """Show bars for stages of which shares are done, if the package for bars is installed."""
    try:
        from edge_spec.progress_bars import ProgressBars
    except ModuleNotFoundError:  # rich belongs to the export stage; measuring works without
        yield None
        return
    with ProgressBars() as bars:
        yield lambda stage, done: bars(stage, round(100 * done), 100)


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
        "context",
        "threads",
        "exactness",
        "output",
    )
    settings = Settings(arguments.bundle, shared_engine=arguments.shared_engine, **_given(arguments, *options))
    return run_bench(settings, shlex.join(["edge-spec", *arguments.words]), arguments.json)


def _inspect(arguments: argparse.Namespace) -> int:
    from edge_spec.bundle import read_manifest

    _print_manifest(arguments.bundle, read_manifest(arguments.bundle), arguments.json)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from edge_spec.demo import run_demo

    return run_demo(**_given(arguments, "model", "prompt", "max_new_tokens", "cache"))


def _print_manifest(path: Path, manifest: Manifest, as_json: bool) -> None:
    from edge_spec.inspection import describe_bundle

    print(json.dumps(manifest.to_json(), indent=1) if as_json else describe_bundle(path, manifest))


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
        lines.append(
            f"time: drafting {counts.draft_seconds:.2f} s, verifying {counts.verify_seconds:.2f} s, "
            f"overhead {counts.overhead_seconds:.2f} s"
        )
    return "\n".join(lines)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that were given; those that were not keep the defaults of the function they go to."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
