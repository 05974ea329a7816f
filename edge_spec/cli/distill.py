"""``edge-spec distill``: makes a tiny draft for a target that has none."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.cli.command import add_command, given, model_name, named_path
from edge_spec.cli.counts import id_count, token_count

if TYPE_CHECKING:
    from edge_spec.distill.distiller import DistillReport
    from edge_spec.distill.train_progress import TrainProgress

# Options that only one kind of draft has.
_OF_KINDS = {"steps": "head", "layers": "tiny"}


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "distill",
        "train a tiny draft for a target that has none",
        "Let the target of a bundle write answers, train a small draft to say the same, add it to the bundle, and "
        "measure whether it pays. The draft is a head that reads the target's hidden states (EAGLE-3), or a tiny model "
        "of a few of the target's layers. A run that was ended goes on where it was "
        "when it is started again with the same options. Needs edge-spec[distill].",
        "edge-spec distill smollm2.pair --work smollm2.distill",
        "edge-spec distill smollm2.pair --kind tiny --layers 2",
        "edge-spec distill coder.pair --work coder.distill --tokens 2m --minutes 600 --device cuda",
        "edge-spec distill smollm2.pair --work mine.distill --prompts my_log.jsonl --start-from smollm2.distill/head "
        "--output mine.pair",
    )
    parser.add_argument("bundle", type=named_path, metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument(
        "--work", type=named_path, metavar="DIR", help="working folder for texts and weights (BUNDLE.distill)"
    )
    parser.add_argument(
        "--output", type=named_path, metavar="DIR", help="write the bundle with its draft here (into BUNDLE)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a bundle that is already at --output, or a draft of another run in BUNDLE",
    )
    parser.add_argument(
        "--target", type=model_name, metavar="MODEL", help="the target's weights (what the bundle was exported from)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")

    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--prompts",
        type=named_path,
        metavar="FILE",
        help="your own: JSON lines with 'prompt', 'messages' or 'turns', as 'edge-spec serve --record' writes them; a "
        "tenth of them is kept back to measure with (a set that comes with edge-spec)",
    )
    texts.add_argument(
        "--tokens", type=token_count, metavar="N", help="tokens of answers to learn from, such as 2m (300k)"
    )
    texts.add_argument("--disk", metavar="SIZE", help="most that they may take, such as 2GiB (8GiB)")
    texts.add_argument("--batch", type=int, metavar="N", help="texts that the target writes at a time (64)")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--kind", choices=("head", "tiny"), help="what to train: a head, or a model of a few layers (head)"
    )
    training.add_argument("--layers", type=int, metavar="N", help="with --kind tiny: layers of the target's shape (2)")
    training.add_argument("--minutes", type=float, metavar="N", help="how long to train (60, unless --epochs says)")
    training.add_argument("--epochs", type=float, metavar="N", help="how often to read each text at most")
    training.add_argument(
        "--start-from",
        type=named_path,
        metavar="DIR",
        help="a draft of this kind to go on from, as in DIR/head, with its size and its ids",
    )
    training.add_argument("--draft-vocab", type=id_count, metavar="N", help="ids that the draft proposes (16k)")
    training.add_argument("--steps", type=int, metavar="N", help="own steps that a head learns from (3)")
    training.add_argument("--learning-rate", type=float, metavar="R", help="the highest one (0.001)")
    training.add_argument("--seed", type=int, metavar="S", help="one seed gives one draft (0)")
    training.add_argument("--device", metavar="cpu|cuda", help="what to train on (cpu)")
    training.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        help="what layers compute in; bfloat16 is faster where the processor or the GPU has it (float32)",
    )
    training.add_argument("--threads", type=int, metavar="N", help="CPU threads (all physical cores)")
    training.add_argument("--no-bench", action="store_true", help="do not measure the draft at the end")
    parser.set_defaults(command=_distill, usage_error=parser.error)


def _distill(arguments: argparse.Namespace) -> int:
    from edge_spec.byte_size import parse_size
    from edge_spec.distill.distiller import distill
    from edge_spec.distill.train_settings import TrainSettings
    from edge_spec.progress_bars import ProgressBars

    kind = arguments.kind or "head"
    for name, other in _OF_KINDS.items():
        if other != kind and given(arguments, name):
            arguments.usage_error(f"--{name} is for --kind {other}, but the kind is {kind}; leave it out")
    if arguments.start_from is not None and (own := given(arguments, "draft_vocab", "layers")):
        arguments.usage_error(
            f"--{next(iter(own)).replace('_', '-')} is what the draft of --start-from has; leave it out"
        )
    if arguments.minutes is None and arguments.epochs is None:
        arguments.minutes = 60.0
    names = {"draft_vocab": "draft_vocabulary"}
    options = given(
        arguments,
        "kind",
        "layers",
        "minutes",
        "epochs",
        "start_from",
        "draft_vocab",
        "steps",
        "learning_rate",
        "seed",
        "device",
        "precision",
    )
    settings = TrainSettings(**{names.get(name, name): value for name, value in options.items()})
    beside = Path(os.path.abspath(arguments.bundle))  # noqa: PTH100 - "." has no name, and a link keeps its own
    work = arguments.work or beside.parent / f"{beside.name}.distill"
    with ProgressBars() as progress:
        report = distill(
            arguments.bundle,
            work,
            settings,
            **given(arguments, "target", "prompts", "output", "threads"),
            tokens=300_000 if arguments.tokens is None else arguments.tokens,
            limit_bytes=parse_size("8GiB" if arguments.disk is None else arguments.disk),
            batch=64 if arguments.batch is None else arguments.batch,
            overwrite=arguments.overwrite,
            measured=not arguments.no_bench,
            progress=progress,
            told=_tell,
        )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    return 0


def _tell(report: TrainProgress) -> None:
    print(report.line(), file=sys.stderr, flush=True)


def _print(report: DistillReport) -> None:
    files, training = report.written.files, report.training
    print(f"Texts: {len(files):,} with {files.answer_tokens:,} tokens of answers, in {files.folder}.")
    if report.written.full:
        print("They stopped there because the disk limit was reached.")
    print(
        f"Training: {training.steps:,} steps in {training.seconds / 60:.0f} min, then {training.reason}; of four "
        f"drafted tokens {training.best_length:.2f} are right on held-out text. Weights: {training.folder}."
    )
    print(f"Bundle: {report.bundle}.")
    if report.verdict is not None:
        print(report.verdict.sentence())
        if not report.verdict.identical:
            print("Some texts differed from plain decoding; see 'edge-spec bench'.")
