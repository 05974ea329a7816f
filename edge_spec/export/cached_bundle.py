"""Keeps bundles that were exported on the way to something else, so that this is done once for the same models."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError, EdgeSpecError
from edge_spec.export.pair import export_pair
from edge_spec.export.progress import Progress, silent
from edge_spec.export.recipe import Device
from edge_spec.processor import integer_products_saturate
from edge_spec.user_cache import named_cache, user_cache


def cached_bundle(
    target: str,
    draft: str | None,
    recipe: str | None = None,
    draft_recipe: str | None = None,
    head: str | None = None,
    device: Device = "cpu",
    offline: bool = False,
    progress: Progress = silent,
    folder: Path | None = None,
) -> tuple[Path, tuple[str, ...]]:
    """Return the bundle of these models, exporting it if it is not there yet, and what its export had to say.

    It is exported again when a local model has changed, by another version of edge-spec, and for a processor with
    another arithmetic. A model on the hub is looked for once: name its revision where that matters.

    Args:
        target: as for :func:`export_pair`, and so are those that follow.
        draft: likewise.
        recipe: likewise.
        draft_recipe: likewise.
        head: likewise.
        device: likewise.
        offline: likewise.
        progress: likewise.
        folder: where such bundles lie; by default ``bundles`` in the user's cache for edge-spec.

    Raises:
        EdgeSpecError: as for :func:`export_pair`.
    """
    key = {
        "version": edge_spec.__version__,
        "target": _identity(target),
        "draft": None if draft is None else _identity(draft),
        "head": None if head is None else _identity(head),
        "recipes": [recipe, draft_recipe],
        "device": device,
        "saturates": integer_products_saturate(),  # then w8a8 weights are stored in another form
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target).name)[:60].strip(".-") or "model"
    path = (default_folder() if folder is None else folder) / f"{stem}-{digest}.pair"
    if _is_whole(path):
        return path, (f"Using {path}, which was exported before.",)
    if path.exists():  # by another version, or damaged
        shutil.rmtree(path)
    report = export_pair(
        target,
        draft,
        path,
        recipe=recipe,
        draft_recipe=draft_recipe,
        head=head,
        device=device,
        offline=offline,
        progress=progress,
    )
    return report.path, (*report.notes, f"Exported to {path}.")


def default_folder() -> Path:
    """Where such bundles lie: in ``EDGE_SPEC_CACHE``, or a place in the user's cache.

    Raises:
        EdgeSpecError: neither is there.
    """
    cache = named_cache() or user_cache()
    if cache is None:
        raise EdgeSpecError("There is no home folder to keep bundles in; name a folder by EDGE_SPEC_CACHE.")
    return cache / "bundles"


def _is_whole(path: Path) -> bool:
    try:
        open_bundle(path, verify=False)  # whoever loads it reads every byte
    except BundleError:
        return False
    return True


def _identity(model: str) -> Any:
    """What tells a model from another one: of files, their sizes and times."""
    path = Path(model)
    if not path.exists():
        return model  # on the hub
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
