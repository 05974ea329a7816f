"""``edge-spec export``: turns models into a pair bundle."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from edge_spec.cli.command import add_command, given, model_name, named_path
from edge_spec.cli.counts import id_count
from edge_spec.cli.inspect import print_manifest
from edge_spec.cli.recipe_list import print_recipes

EXPORTERS = ("native", "optimum")
RECIPES = ("int4", "int4-128", "w8a8", "fp16", "fp32", "auto")
HEAD_RECIPES = ("int4", "int4-128", "w8a8", "fp16", "fp32")
# Options that the list of recipes has no use for.
_OF_EXPORTS = (
    *("pair", "bundle", "target", "draft", "head", "recipe", "output", "draft_via", "draft_recipe", "head_recipe"),
    *("draft_vocab", "draft_vocab_text", "draft_device", "context", "taps"),
)
# Those that a bundle's new head has, and its new draft.
_OF_HEADS = ("bundle", "head", "target", "head_recipe", "taps", "output")
_OF_DRAFTS = (
    "bundle",
    "draft",
    "draft_recipe",
    "draft_via",
    "draft_vocab",
    "draft_vocab_text",
    "draft_device",
    "output",
)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "export",
        "turn a target and a draft model into a pair bundle",
        "Turn a target and, optionally, a small draft, best of the same family, into one pair bundle: quantized ONNX "
        "graphs that 'edge-spec run' generates with. A model is a GGUF file, a Hugging Face folder, or on the hub "
        "owner/name, owner/name:Q4_K_M or owner/name/file.gguf, each with @revision if need be.",
        "edge-spec export --list",
        "edge-spec export --recipe qwen2.5-coder-1.5b --output coder.pair",
        "edge-spec export --target coder-1.5b.gguf --draft coder-0.5b.gguf --output coder.pair",
        "edge-spec export --target HuggingFaceTB/SmolLM2-135M-Instruct@main --output smollm2.pair --recipe int4",
        "edge-spec export --recipe qwen2.5-coder-1.5b --device cuda --draft-device both --output coder-cuda.pair",
        "edge-spec export --pair models/qwen2.5-coder-1.5b.toml --output coder.pair",
        "edge-spec export --target Qwen/Qwen3-1.7B --head AngelSlim/Qwen3-1.7B_eagle3 --output qwen3.pair",
        "edge-spec export --bundle coder.pair --head ./my-head",
        "edge-spec export --bundle coder.pair --draft ./my-draft --draft-vocab 8k",
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--pair",
        type=model_name,
        metavar="FILE|NAME",
        help="TOML file, or shipped recipe, that names the models and how they are stored; the options here win",
    )
    models.add_argument(
        "--target", type=model_name, metavar="MODEL", help="the model whose text is wanted; --pair can name it instead"
    )
    models.add_argument(
        "--draft", type=model_name, metavar="MODEL", help="a much smaller model, best with the same tokenizer"
    )
    models.add_argument(
        "--head",
        type=model_name,
        metavar="HEAD",
        help="a small network that drafts from the target's hidden states, such as EAGLE-3",
    )
    models.add_argument(
        "--bundle", type=model_name, metavar="DIR", help="give a bundle that is there a --head or a --draft"
    )
    models.add_argument("--offline", action="store_true", help="take what is on the hub from its local cache only")
    models.add_argument("--list", action="store_true", help="print the recipes that are shipped, and export nothing")
    models.add_argument("--via", choices=EXPORTERS, default="native", help="who writes the target's graph (native)")
    models.add_argument("--draft-via", choices=EXPORTERS, help="who writes the draft's graph (as the target's)")
    storage = parser.add_argument_group("storage")
    storage.add_argument(
        "--recipe",
        metavar="RECIPE",
        help=f"how the target is stored: {', '.join(RECIPES)} (cpu: w8a8, cuda: int4), where auto measures "
        "what pays on this machine; without --target, the name of a shipped recipe, as --pair",
    )
    storage.add_argument("--draft-recipe", choices=RECIPES, help="how the draft is stored (cpu: int4-128, cuda: int4)")
    storage.add_argument("--head-recipe", choices=HEAD_RECIPES, help="how the head is stored (cpu: w8a8, cuda: fp16)")
    storage.add_argument(
        "--taps",
        type=_layers,
        metavar="N,N,N",
        help="behind how many layers the target tells its hidden states (what the head's checkpoint says)",
    )
    storage.add_argument(
        "--draft-vocab", type=id_count, metavar="N", help="let the draft propose the N likeliest ids only, such as 32k"
    )
    storage.add_argument(
        "--draft-vocab-text", nargs="+", metavar="FILE", help="text such as the pair will write, to choose those ids by"
    )
    storage.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the graphs run on (cpu)")
    storage.add_argument(
        "--draft-device",
        choices=("cpu", "cuda", "both"),
        help="with --device cuda: what the draft runs on; both leaves the choice to loading (cuda)",
    )
    storage.add_argument(
        "--context", type=int, metavar="TOKENS", help="longest text of the target (what it was trained for)"
    )
    parser.add_argument("--output", type=named_path, metavar="DIR", help="the bundle's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is already there")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with a float32 reference")
    parser.add_argument("--json", action="store_true", help="print the manifest, or the list, as JSON")
    parser.set_defaults(command=_export, usage_error=parser.error)


def _layers(text: str) -> tuple[int, ...]:
    """Read numbers of layers between commas."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or any(layer < 1 for layer in layers):
        raise argparse.ArgumentTypeError(f"{text!r} names no layers, expected numbers such as 2,15,27")
    return layers


def _export(arguments: argparse.Namespace) -> int:
    if arguments.list:
        if others := given(arguments, *_OF_EXPORTS):
            arguments.usage_error(f"--list exports nothing; leave out --{next(iter(others)).replace('_', '-')}")
        return print_recipes(arguments.json)
    if arguments.head is None and given(arguments, "head_recipe"):
        arguments.usage_error("--head-recipe is about a head, and there is none: give --head")
    if arguments.bundle is not None:
        return _add(arguments)
    if arguments.output is None:
        arguments.usage_error("the following arguments are required: --output")
    models = _models(arguments)
    if models.get("draft") is None and (about := given(arguments, "draft_recipe", "draft_via")):
        arguments.usage_error(
            f"--{next(iter(about)).replace('_', '-')} is about a draft, and there is none: give --draft"
        )
    from edge_spec.export.pair import export_pair
    from edge_spec.progress_bars import ProgressBars

    with ProgressBars() as progress:
        report = export_pair(
            **{**models, **given(arguments, "draft_device", "context", "draft_vocab", "draft_vocab_text", "taps")},
            output=arguments.output,
            device=arguments.device,
            check=not arguments.no_check,
            overwrite=arguments.overwrite,
            offline=arguments.offline,
            via=arguments.via,
            draft_via=arguments.draft_via,
            progress=progress,
        )
    for note in report.notes:
        print(note, file=sys.stderr)
    print_manifest(report.path, report.manifest, arguments.json)
    return 0


def _add(arguments: argparse.Namespace) -> int:
    """Give a bundle a head or a draft."""
    if (arguments.head is None) == (arguments.draft is None):
        arguments.usage_error("--bundle is given a head or a draft: give --head or --draft, not both")
    own = _OF_DRAFTS if arguments.head is None else _OF_HEADS
    others = given(arguments, *(name for name in _OF_EXPORTS if name not in own))
    if others:
        arguments.usage_error(f"--bundle is there already; leave out --{next(iter(others)).replace('_', '-')}")
    from edge_spec.export import add_draft, add_head
    from edge_spec.progress_bars import ProgressBars

    common = {name: getattr(arguments, name) for name in ("output", "overwrite", "offline")}
    with ProgressBars() as progress:
        if arguments.head is not None:
            report = add_head(
                arguments.bundle,
                arguments.head,
                recipe=arguments.head_recipe,
                taps=arguments.taps,
                target=arguments.target,
                progress=progress,
                **common,
            )
        else:
            report = add_draft(
                arguments.bundle,
                arguments.draft,
                recipe=arguments.draft_recipe,
                via=arguments.draft_via or "native",
                check=not arguments.no_check,
                progress=progress,
                **given(arguments, "draft_device", "draft_vocab", "draft_vocab_text"),
                **common,
            )
    for note in report.notes:
        print(note, file=sys.stderr)
    print_manifest(report.path, report.manifest, arguments.json)
    return 0


def _models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is exported and how it is stored: what the options say, else the pair recipe."""
    pair, recipe = arguments.pair, arguments.recipe
    if pair is None and arguments.target is None:
        if recipe is None or recipe in RECIPES:
            arguments.usage_error("one of --target and --pair is required, or the name of a pair as --recipe")
        pair, recipe = recipe, None
    from edge_spec.export.draft_place import draft_devices
    from edge_spec.export.recipe import runs_on
    from edge_spec.export.shipped_recipes import find_pair_recipe, require_pair_name, require_storage_name

    if recipe is not None:
        require_storage_name(recipe)
    elif arguments.pair is None and pair is not None:
        require_pair_name(pair)
    named: dict[str, Any] = {"draft": None}
    if pair is not None:
        written = find_pair_recipe(pair)
        has_draft = (arguments.draft or written.draft) is not None
        drafts_on = draft_devices(arguments.draft_device, arguments.device, has_draft)
        named = written.models(arguments.device, drafts_on)
        for name, option, devices in (
            ("recipe", recipe, (arguments.device,)),
            ("draft_recipe", arguments.draft_recipe, drafts_on),
        ):
            if named[name] is None and getattr(written, name) is not None and option is None:
                lacks = next(device for device in devices if not runs_on(getattr(written, name), device))
                taken = "whose own is taken" if len(devices) == 1 else "so each device's own is taken"
                print(f"{pair}: its {name} is not for {lacks}, {taken}.", file=sys.stderr)
    options = given(arguments, "target", "draft", "draft_recipe", "head", "head_recipe")
    return {**named, **options, **({} if recipe is None else {"recipe": recipe})}
