"""Adds a draft model to a bundle that is there already, or replaces the one it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edge_spec.bundle import open_bundle, read_manifest
from edge_spec.errors import EdgeSpecError
from edge_spec.export.bundle_text import BundleText
from edge_spec.export.draft_place import (
    DRAFT_FOLDERS,
    DraftDevice,
    check_draft_vocabulary,
    draft_devices,
    write_drafts,
)
from edge_spec.export.draft_vocabulary import choose_speech
from edge_spec.export.measured_model import memory_errors, open_for, recipe_for
from edge_spec.export.pair import ExportReport
from edge_spec.export.progress import Progress, silent
from edge_spec.export.rebuilt_bundle import rebuilt_bundle
from edge_spec.export.recipe import AUTO, DEFAULT_RECIPES, Recipe
from edge_spec.manifest import Via


def add_draft(
    bundle: str | os.PathLike[str],
    draft: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    recipe: str | Recipe | None = None,
    draft_device: DraftDevice | None = None,
    via: Via = "native",
    draft_vocab: int | None = None,
    draft_vocab_text: Sequence[str | os.PathLike[str]] = (),
    draft_ids: npt.NDArray[np.int64] | None = None,
    check: bool = True,
    overwrite: bool = False,
    offline: bool = False,
    progress: Progress = silent,
) -> ExportReport:
    """Give a bundle a draft model, in place of any that it has; on any error the bundle is as it was.

    The bundle is written anew beside itself and takes its own place when it is whole; what does not change is linked.

    Args:
        bundle: folder of the bundle.
        draft: a GGUF file, a Hugging Face folder or a name on the hub.
        output: folder of the new bundle; ``None`` for the bundle's own.
        recipe: how the draft is stored; ``None`` for the device's default.
        draft_device: what it runs on beside a target for CUDA; see :func:`~edge_spec.export.pair.export_pair`.
        via: who writes its graph.
        draft_vocab: ids that the draft proposes at most; ``None`` for all.
        draft_vocab_text: files of text such as the pair will write, which say what ids those should be.
        draft_ids: int64, ascending, those ids themselves; instead of the two.
        check: compare each written graph with a float32 reference.
        overwrite: replace another bundle that is already at ``output``.
        offline: take what is named on the hub from its cache only.
        progress: told how far it is.

    Raises:
        BundleError: there is no such bundle, or ``output`` is in the way or cannot be written.
        CheckpointError: the draft is missing, damaged or not supported.
        PairError: it cannot be written in what the target reads.
        QualityError: a written graph strays too far from the reference.
    """
    opened = open_bundle(bundle, verify=False)
    manifest, device = opened.manifest, opened.manifest.device
    recipes = {
        runs_on: recipe_for(recipe, DEFAULT_RECIPES[runs_on][1], runs_on, via)
        for runs_on in draft_devices(draft_device, device, has_draft=True)
    }
    if not check and AUTO in recipes.values():
        raise EdgeSpecError("Recipe 'auto' needs the check of the written graph; leave it in, or name a recipe.")
    check_draft_vocabulary(True, draft_vocab, draft_vocab_text)
    target = BundleText(opened)
    with memory_errors(), rebuilt_bundle(opened, output, overwrite, _is_of_draft) as rebuilt:
        checkpoint = open_for(draft, via, None, offline)
        speech = choose_speech(target, checkpoint, draft_vocab, draft_vocab_text, progress, draft_ids)
        drafts, told = write_drafts(rebuilt.folder, speech, target.vocabulary, device, recipes, check, progress)
        progress("seal", 0, 1)
        rebuilt.seal(
            replace(
                manifest,
                draft=drafts.get(device),
                cpu_draft=drafts.get("cpu") if device == "cuda" else None,
                draft_vocabulary=speech.record,
            )
        )
        progress("seal", 1, 1)
    return ExportReport(rebuilt.path, read_manifest(rebuilt.path), (*speech.notes, *told))


def _is_of_draft(name: str) -> bool:
    return name.split("/")[0] in DRAFT_FOLDERS
