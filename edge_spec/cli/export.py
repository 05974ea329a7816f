"""``edge-spec export``: turns models into a pair bundle."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from edge_spec.cli.command import add_command, given
from edge_spec.cli.inspect import print_manifest

RECIPES = ("int4", "int4-128", "w8a8", "fp16", "fp32")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
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
    parser.add_argument(
        "--draft-vocab", type=_count, metavar="N", help="let the draft propose the N likeliest ids only, such as 32k"
    )
    parser.add_argument(
        "--draft-vocab-text", nargs="+", metavar="FILE", help="text such as the pair will write, to choose those ids by"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the graphs run on (cpu)")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is already there")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with a float32 reference")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(command=_export, usage_error=parser.error)


def _count(text: str) -> int:
    """Read a number of ids, in thousands (1,024) where it ends with a k."""
    digits, thousands = (text[:-1], 1024) if text[-1:] in "kK" else (text, 1)
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ids, expected one such as 32k or 32768")
    return int(digits) * thousands


def _export(arguments: argparse.Namespace) -> int:
    if arguments.target is None and arguments.pair is None:
        arguments.usage_error("one of --target and --pair is required")
    from edge_spec.export.pair import export_pair
    from edge_spec.export.pair_recipe import read_pair_recipe
    from edge_spec.progress_bars import ProgressBars

    models = {"draft": None} if arguments.pair is None else vars(read_pair_recipe(arguments.pair))
    with ProgressBars() as progress:
        report = export_pair(
            **{
                **models,
                **given(arguments, "target", "draft", "recipe", "draft_recipe", "draft_vocab", "draft_vocab_text"),
            },
            output=arguments.output,
            device=arguments.device,
            check=not arguments.no_check,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    for note in report.notes:
        print(note, file=sys.stderr)
    print_manifest(report.path, report.manifest, arguments.json)
    return 0
