"""The pair recipes that come with edge-spec, found by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from edge_spec.errors import EdgeSpecError
from edge_spec.export.pair_recipe import PairRecipe, read_pair_recipe
from edge_spec.export.recipe import RECIPES

_PACKAGE = Path(__file__).parent.parent
# In an installed package, and in a checkout.
_FOLDERS = (_PACKAGE / "models", _PACKAGE.parent / "models")


def shipped_recipes() -> Mapping[str, Path]:
    """Return the files of the recipes by name, in order of the names."""
    for folder in _FOLDERS:
        files = {file.stem: file for file in folder.glob("*.toml")}
        if files:
            return dict(sorted(files.items()))
    return {}


def find_pair_recipe(name: str) -> PairRecipe:
    """Read a pair recipe.

    Args:
        name: a TOML file, or the name of a recipe that is shipped.

    Raises:
        EdgeSpecError: there is neither, or the file is not valid.
    """
    path = Path(name)
    known = shipped_recipes()
    if name in known and not path.is_file():
        return read_pair_recipe(known[name])
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return read_pair_recipe(path)
    raise EdgeSpecError(
        f"There is no pair recipe {name!r}, neither as a file nor by name{_closest(name, known)}; expected a TOML file "
        f"or one of {', '.join(known)}. 'edge-spec export --list' describes them."
    )


def require_pair_name(name: str) -> None:
    """Raise EdgeSpecError unless a name, given where a recipe of either kind may stand, is that of a shipped pair."""
    known = shipped_recipes()
    if name in known:
        return
    raise EdgeSpecError(
        f"There is no recipe {name!r}{_closest(name, (*known, *RECIPES))}; expected a pair, one of {', '.join(known)}, "
        f"or with --target how it is stored, one of {', '.join(RECIPES)}."
    )


def require_storage_name(name: str) -> None:
    """Raise EdgeSpecError unless a name, given beside a model, says how that model is stored."""
    if name in RECIPES:
        return
    pairs = shipped_recipes()
    if name in pairs:
        raise EdgeSpecError(
            f"{name!r} is a pair recipe, which names its models itself; leave --target away, or give --pair {name} and "
            f"how the target is stored, one of {', '.join(RECIPES)}, as --recipe."
        )
    raise EdgeSpecError(
        f"There is no recipe {name!r} to store a model{_closest(name, (*RECIPES, *pairs))}; expected one of "
        f"{', '.join(RECIPES)}."
    )


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
