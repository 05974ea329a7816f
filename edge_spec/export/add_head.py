"""Adds a head to a bundle that is there already, or replaces the one it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from edge_spec.bundle import open_bundle, read_manifest
from edge_spec.export.heads.head_folder import open_head_folder
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.export.heads.write_head import HEAD_FILES, write_head
from edge_spec.export.pair import ExportReport
from edge_spec.export.progress import Progress, silent
from edge_spec.export.rebuilt_bundle import rebuilt_bundle
from edge_spec.export.recipe import DEFAULT_HEAD_RECIPES, Recipe, find_recipe


def add_head(
    bundle: str | os.PathLike[str],
    head: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    recipe: str | Recipe | None = None,
    taps: Sequence[int] | None = None,
    target: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    offline: bool = False,
    progress: Progress = silent,
) -> ExportReport:
    """Give a bundle a head, in place of any that it has; on any error the bundle is as it was.

    The bundle is written anew beside itself and takes its own place when it is whole; what does not change is linked.

    Args:
        bundle: folder of the bundle.
        head: folder of the head's checkpoint, or its name on the hub.
        output: folder of the new bundle; ``None`` for the bundle's own.
        recipe: how the head is stored; ``None`` for the device's default.
        taps: behind how many layers the head reads the target, in the order of its weights; ``None`` for what its
            checkpoint says.
        target: the target's checkpoint, for heads that need what the bundle has in other weights; ``None`` for where
            the bundle says that it was.
        overwrite: replace another bundle that is already at ``output``.
        offline: take what is named on the hub from its cache only.
        progress: told how far it is.

    Raises:
        BundleError: there is no such bundle, or ``output`` is in the way or cannot be written.
        CheckpointError: the head is missing, damaged or does not fit the target.
        UnsupportedError: the head is of a kind that is not built.
    """
    opened = open_bundle(bundle, verify=False)
    manifest = opened.manifest
    chosen = find_recipe(recipe or DEFAULT_HEAD_RECIPES[manifest.device], manifest.device)
    checkpoint = open_head_folder(head, offline)
    record = manifest.target
    if target is not None:
        record = replace(record, source=os.fspath(target))
        checkpoint_of(record, "weights")  # whether this head needs them or not, the bundle will name them
    with rebuilt_bundle(opened, output, overwrite, lambda name: name in HEAD_FILES) as rebuilt:
        bare = replace(manifest, target=record, head=None, files={})
        written = write_head(rebuilt.folder, bare, checkpoint, chosen, taps, progress)
        progress("seal", 0, 1)
        rebuilt.seal(written, replaced={graph.path for graph in manifest.target.graphs})
        progress("seal", 1, 1)
    return ExportReport(rebuilt.path, read_manifest(rebuilt.path), ())
