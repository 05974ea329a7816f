"""Pair recipes: TOML files that say where a target and its draft come from and how each is stored.

::

    [target]
    source = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    recipe = "w8a8"
    licence = "Apache-2.0"

    [target.formats] # layer classes that are stored otherwise
    lm_head = "fp16"

    [draft]
    source = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    recipe = "int4-128"

    [head] # drafts from the target's hidden states (docs/heads.md)
    source = "owner/name"

A source is a name on the hub or a path, which is looked for beside the file first. Only ``[target]`` and its source are
required. Without a ``recipe``, a model gets its device's default. ``[about]`` and ``[memory]`` are for people, and for
the list of recipes that are shipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.export.recipe import AUTO, RECIPES, Device, Recipe, runs_on, with_formats

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Memory of the devices that recipes are planned for.
DEVICES_GB = (4, 8, 16)

_MODEL_KEYS = ("source", "recipe", "formats", "licence", "licence_url", "gated")
_KV_TYPES = ("float32", "int8")


@dataclass(frozen=True)
class Licence:
    """What one model may be used for.

    Attributes:
        name: an SPDX identifier, or what the licence calls itself; ``None`` if the recipe does not say.
        url: its text, where the name does not lead to it.
        gated: whether the hub gives the model out only after the terms were accepted there.
    """

    name: str | None = None
    url: str | None = None
    gated: bool = False


@dataclass(frozen=True)
class About:
    """What a person should know of a recipe.

    Attributes:
        title: in one line.
        run: what of it has really been run, and from which files; ``None``: nothing.
        note: anything else.
    """

    title: str
    run: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class DevicePlan:
    """How the pair fits a device: tokens of context, whether with the draft, the target's cache, peak in MiB."""

    context: int
    draft: bool
    kv: str
    peak_mib: int


@dataclass(frozen=True)
class ExpectedMemory:
    """What the pair is predicted to take, by the laws of the memory plan.

    Attributes:
        context: tokens of context.
        peak_mib: of the whole process in MiB, with that context and nothing given up.
        devices: by their memory in GB, how the pair fits them; those that it does not fit are absent.
    """

    context: int
    peak_mib: int
    devices: Mapping[int, DevicePlan]

    def device_gb(self, draft: bool) -> int | None:
        """Return the smallest device for the whole context, float32 keys and values, and the draft if there is one."""
        whole = (self.context, draft, "float32")
        return min(
            (size for size, plan in self.devices.items() if (plan.context, plan.draft, plan.kv) == whole), default=None
        )


@dataclass(frozen=True)
class PairRecipe:
    """The models of a pair, and what is known of them.

    Attributes:
        target: a GGUF file, a Hugging Face folder or a name on the hub.
        draft: likewise, or ``None`` for a target alone.
        recipe: the target's recipe; ``None`` stands for the device's default.
        draft_recipe: the draft's, likewise.
        licence, draft_licence: of the models.
        about, memory: as the file says.
        head: drafts from the target's hidden states, a folder or a name on the hub; ``None`` without.
        head_recipe, head_licence: of the head, as above.
    """

    target: str
    draft: str | None
    recipe: Recipe | None
    draft_recipe: Recipe | None
    licence: Licence = field(default_factory=Licence)
    draft_licence: Licence = field(default_factory=Licence)
    about: About | None = None
    memory: ExpectedMemory | None = None
    head: str | None = None
    head_recipe: Recipe | None = None
    head_licence: Licence = field(default_factory=Licence)

    def models(self, device: Device = "cpu", draft_devices: Sequence[Device] | None = None) -> dict[str, Any]:
        """Return the models and their recipes under the names that :func:`edge_spec.export.export_pair` knows.

        Recipes that do not run on their device are left to its defaults: a pair is written for one kind of device, and
        its models run on others as well.

        Args:
            device: what the target runs on.
            draft_devices: what the draft runs on; ``None``: on the same.
        """
        on_draft_devices = all(runs_on(self.draft_recipe, each) for each in draft_devices or (device,))
        return {
            "target": self.target,
            "draft": self.draft,
            "recipe": self.recipe if runs_on(self.recipe, device) else None,
            "draft_recipe": self.draft_recipe if on_draft_devices else None,
            **({} if self.head is None else self._head(device)),
        }

    def _head(self, device: Device) -> dict[str, Any]:
        recipe = self.head_recipe if runs_on(self.head_recipe, device) else None
        return {"head": self.head, "head_recipe": recipe}


def read_pair_recipe(path: Path) -> PairRecipe:
    """Read a pair recipe. Raises EdgeSpecError if the file is missing, is not TOML, or says anything unknown."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise EdgeSpecError(f"The pair recipe {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # bad TOML, bad UTF-8
        raise EdgeSpecError(f"The pair recipe {path} is not a TOML file: {error}.") from error
    try:
        return _read(content, path.parent)
    except EdgeSpecError as error:
        raise EdgeSpecError(f"The pair recipe {path} is not valid: {error}") from error


def _read(content: Mapping[str, Any], folder: Path) -> PairRecipe:
    _require_known(content, ("target", "draft", "head", "about", "memory"), "the file")
    if "target" not in content:
        raise EdgeSpecError("there is no [target], whose source names the model.")
    target, recipe, licence = _model(content, "target", folder)
    draft, draft_recipe, draft_licence = (
        _model(content, "draft", folder) if "draft" in content else (None, None, Licence())
    )
    head, head_recipe, head_licence = _model(content, "head", folder) if "head" in content else (None, None, Licence())
    if head_recipe == AUTO:
        raise EdgeSpecError("[head] has the recipe 'auto', which is for whole models; name another, or leave it out.")
    about = _about(content["about"]) if "about" in content else None
    memory = _memory(content["memory"]) if "memory" in content else None
    return PairRecipe(
        target,
        draft,
        recipe,
        draft_recipe,
        licence,
        draft_licence,
        about,
        memory,
        head,
        head_recipe,
        head_licence,
    )


def _model(content: Mapping[str, Any], role: str, folder: Path) -> tuple[str, Recipe | None, Licence]:
    """Return source, recipe and licence of one model."""
    table = _table(content[role], f"[{role}]")
    _require_known(table, _MODEL_KEYS, f"[{role}]")
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
    licence = Licence(
        _get(table, "licence", str, f"[{role}]"),
        _get(table, "licence_url", str, f"[{role}]"),
        bool(_get(table, "gated", bool, f"[{role}]")),
    )
    if name is None:
        if "formats" in table:
            raise EdgeSpecError(f"[{role}.formats] changes a recipe, so [{role}] needs one: {', '.join(RECIPES)}.")
        return source, None, licence
    if not isinstance(name, str) or name not in RECIPES:
        raise EdgeSpecError(f"[{role}] has the unknown recipe {name!r}; expected one of {', '.join(RECIPES)}.")
    if name == AUTO.name and "formats" in table:
        raise EdgeSpecError(
            f"[{role}.formats] cannot be combined with recipe 'auto', which chooses the formats itself."
        )
    try:
        recipe = with_formats(RECIPES[name], _table(table.get("formats", {}), f"[{role}.formats]"))
    except EdgeSpecError as error:
        raise EdgeSpecError(f"[{role}.formats]: {error}") from error
    return source, recipe, licence


def _about(value: object) -> About:
    table = _table(value, "[about]")
    _require_known(table, ("title", "run", "note"), "[about]")
    title = _get(table, "title", str, "[about]", required=True)
    return About(title, _get(table, "run", str, "[about]"), _get(table, "note", str, "[about]"))


def _memory(value: object) -> ExpectedMemory:
    table = _table(value, "[memory]")
    _require_known(table, ("context", "peak_mib", "devices"), "[memory]")
    devices = {}
    for size, plan in _table(table.get("devices", {}), "[memory.devices]").items():
        if size not in map(str, DEVICES_GB):
            expected = ", ".join(map(str, DEVICES_GB))
            raise EdgeSpecError(f"[memory.devices] has the unknown device {size!r}; expected GB of memory: {expected}.")
        devices[int(size)] = _device_plan(plan, f"[memory.devices.{size}]")
    context, peak = (_get(table, name, int, "[memory]", required=True) for name in ("context", "peak_mib"))
    return ExpectedMemory(context, peak, devices)


def _device_plan(value: object, name: str) -> DevicePlan:
    table = _table(value, name)
    _require_known(table, ("context", "draft", "kv", "peak_mib"), name)
    kv = _get(table, "kv", str, name, required=True)
    if kv not in _KV_TYPES:
        raise EdgeSpecError(f"{name} has the unknown kv {kv!r}; expected one of {', '.join(_KV_TYPES)}.")
    context, peak = (_get(table, key, int, name, required=True) for key in ("context", "peak_mib"))
    return DevicePlan(context, _get(table, "draft", bool, name, required=True), kv, peak)


def _get(table: Mapping[str, Any], key: str, kind: type, name: str, *, required: bool = False) -> Any:
    """Return a value of one kind, ``None`` if it is absent. Numbers are above zero, and texts not empty."""
    value = table.get(key)
    if value is None and not required:
        return None
    if type(value) is not kind or (kind is not bool and not value) or (isinstance(value, int) and value < 0):
        expected = {str: "a text", int: "a whole number above zero", bool: "true or false"}[kind]
        given = f"has {key} = {value!r}" if key in table else f"lacks {key!r}"
        raise EdgeSpecError(f"{name} {given}; expected {expected}.")
    return value


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EdgeSpecError(f"{name} is to be a table, not {value!r}.")
    return value


def _require_known(table: Mapping[str, Any], known: tuple[str, ...], name: str) -> None:
    for key in table:
        if key not in known:
            raise EdgeSpecError(f"{name} has the unknown key {key!r}; expected {', '.join(known)}.")
