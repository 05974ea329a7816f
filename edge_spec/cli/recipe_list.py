"""The list of the pair recipes that are shipped, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.export.pair_recipe import DevicePlan, PairRecipe

_HEADINGS = ("NAME", "MODELS", "MEMORY", "DEVICE", "LICENCE", "RUN")
_LEGEND = """
MEMORY is the predicted peak with 4,096 tokens of context, and DEVICE has enough for that besides its system; where a
smaller one has enough for less, that is named behind it. RUN says what has been exported and run, and from which files.
* The hub asks everybody to accept the licence first.

To export one of these pairs:

  edge-spec export --recipe NAME --output DIR"""


def print_recipes(as_json: bool) -> int:
    """Print the recipes, one a line, or as a JSON list, and return the exit status."""
    from edge_spec.export.pair_recipe import read_pair_recipe
    from edge_spec.export.shipped_recipes import shipped_recipes

    recipes = {name: read_pair_recipe(path) for name, path in shipped_recipes().items()}
    if as_json:
        print(json.dumps([_as_json(name, pair) for name, pair in recipes.items()], indent=1))
        return 0
    rows = [_HEADINGS, *(_row(name, pair) for name, pair in recipes.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(_LEGEND)
    return 0


def _row(name: str, pair: PairRecipe) -> tuple[str, ...]:
    memory, about = pair.memory, pair.about
    return (
        name,
        pair.target if about is None else about.title,
        "" if memory is None else f"{memory.peak_mib / 1024:.1f} GiB",
        ", ".join(_devices(pair)),
        ", ".join(dict.fromkeys(_licences(pair))),
        (about.run if about is not None else None) or "no",
    )


def _devices(pair: PairRecipe) -> Iterator[str]:
    """Yield the smallest device for everything, and before that a smaller one with what it lacks."""
    if pair.memory is None:
        return
    whole = pair.memory.device_gb(pair.draft is not None)
    if whole is not None:
        yield f"{whole} GB"
    smaller = [size for size in sorted(pair.memory.devices) if whole is None or size < whole]
    if smaller:
        yield f"{smaller[0]} GB with {' and '.join(_given_up(pair, pair.memory.devices[smaller[0]]))}"


def _given_up(pair: PairRecipe, plan: DevicePlan) -> Iterator[str]:
    if pair.draft is not None and not plan.draft:
        yield "no draft"
    if plan.kv != "float32":
        yield f"{plan.kv} keys and values"
    if pair.memory is not None and plan.context < pair.memory.context:
        yield f"{plan.context:,} tokens"


def _licences(pair: PairRecipe) -> Iterator[str]:
    for licence in (pair.licence, pair.draft_licence, pair.head_licence):
        if licence.name is not None:
            yield licence.name + ("*" if licence.gated else "")


def _as_json(name: str, pair: PairRecipe) -> dict[str, Any]:
    def model(source: str, recipe: Any, licence: Any) -> dict[str, Any]:
        return {"source": source, "recipe": None if recipe is None else recipe.to_dict(), "licence": asdict(licence)}

    return {
        "name": name,
        "about": None if pair.about is None else asdict(pair.about),
        "target": model(pair.target, pair.recipe, pair.licence),
        "draft": None if pair.draft is None else model(pair.draft, pair.draft_recipe, pair.draft_licence),
        "head": None if pair.head is None else model(pair.head, pair.head_recipe, pair.head_licence),
        "memory": None if pair.memory is None else asdict(pair.memory),
        "device_gb": None if pair.memory is None else pair.memory.device_gb(pair.draft is not None),
    }
