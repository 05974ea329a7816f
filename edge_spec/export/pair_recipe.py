"""Pair recipes: TOML files that say where a target and its draft come from and how each is stored.

::

    [target]
    source = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    recipe = "w8a8"

    [target.formats] # optional: layer classes that are stored otherwise
    lm_head = "fp16"

    [draft] # optional
    source = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    recipe = "int4-128"

A source is a hub id or a path, which is looked for beside the file first. Without a ``recipe``, a model gets its
device's default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.export.recipe import RECIPES, Recipe, with_formats

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class PairRecipe:
    """The models of a pair and their recipes, under the names that :func:`edge_spec.export.export_pair` knows.

    Attributes:
        target: a GGUF file, a Hugging Face folder or a hub id.
        draft: likewise, or ``None`` for a target alone.
        recipe: the target's recipe; ``None`` stands for the device's default.
        draft_recipe: the draft's, likewise.
    """

    target: str
    draft: str | None
    recipe: Recipe | None
    draft_recipe: Recipe | None


def read_pair_recipe(path: Path) -> PairRecipe:
    """Read a pair recipe. Raises EdgeSpecError if the file is missing, is not TOML, or says anything unknown."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise EdgeSpecError(f"The pair recipe {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # bad TOML, bad UTF-8
        raise EdgeSpecError(f"The pair recipe {path} is not a TOML file: {error}.") from error
    try:
        _require_known(content, ("target", "draft"), "the file")
        if "target" not in content:
            raise EdgeSpecError("there is no [target], whose source names the model.")
        target, recipe = _model(content, "target", path.parent)
        draft, draft_recipe = _model(content, "draft", path.parent) if "draft" in content else (None, None)
    except EdgeSpecError as error:
        raise EdgeSpecError(f"The pair recipe {path} is not valid: {error}") from error
    return PairRecipe(target, draft, recipe, draft_recipe)


def _model(content: Mapping[str, Any], role: str, folder: Path) -> tuple[str, Recipe | None]:
    """Return source and recipe of one model."""
    table = _table(content[role], f"[{role}]")
    _require_known(table, ("source", "recipe", "formats"), f"[{role}]")
    source, name = table.get("source"), table.get("recipe")
    if not isinstance(source, str) or not source:
        given = f", not {source!r}" if "source" in table else ""
        raise EdgeSpecError(f"[{role}] needs a source: a GGUF file, a Hugging Face folder or a hub id{given}.")
    beside = folder / os.path.expanduser(source)  # noqa: PTH111 - Path's own raises RuntimeError on an unknown ~user
    try:
        if beside.exists():
            source = str(beside)
    except OSError as error:
        raise EdgeSpecError(f"[{role}] names {str(beside)!r}, which cannot be read: {error.strerror}.") from error
    if name is None:
        if "formats" in table:
            raise EdgeSpecError(f"[{role}.formats] changes a recipe, so [{role}] needs one: {', '.join(RECIPES)}.")
        return source, None
    if not isinstance(name, str) or name not in RECIPES:
        raise EdgeSpecError(f"[{role}] has the unknown recipe {name!r}; expected one of {', '.join(RECIPES)}.")
    try:
        return source, with_formats(RECIPES[name], _table(table.get("formats", {}), f"[{role}.formats]"))
    except EdgeSpecError as error:
        raise EdgeSpecError(f"[{role}.formats]: {error}") from error


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EdgeSpecError(f"{name} is to be a table, not {value!r}.")
    return value


def _require_known(table: Mapping[str, Any], known: tuple[str, ...], name: str) -> None:
    for key in table:
        if key not in known:
            raise EdgeSpecError(f"{name} has the unknown key {key!r}; expected {', '.join(known)}.")
