"""Writes a draft into a bundle, for each device that it is to run on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from edge_spec.errors import EdgeSpecError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.draft_vocabulary import DraftSpeech
from edge_spec.export.measured_model import export_measured
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Device, Recipe
from edge_spec.manifest import ModelRecord

# What the draft's graphs run on; ``"both"``: once for each, and loading decides.
DraftDevice = Literal["cpu", "cuda", "both"]

# The folders of a draft for the target's own device, and of one for the CPU beside a target for CUDA.
DRAFT_FOLDERS = ("draft", "draft-cpu")


def draft_devices(wanted: DraftDevice | None, device: Device, has_draft: bool) -> tuple[Device, ...]:
    """What the draft is written for, the target's own device first."""
    if wanted not in (None, "cpu", "cuda", "both"):
        raise EdgeSpecError(f"draft_device is {wanted!r}, expected 'cpu', 'cuda' or 'both'.")
    if wanted is not None and not has_draft:
        raise EdgeSpecError(
            "draft_device (--draft-device) says what a draft runs on, but there is none; name one, or leave it out."
        )
    if device == "cpu" and wanted not in (None, "cpu"):
        raise EdgeSpecError(
            f"draft_device (--draft-device) is {wanted!r}, but the target is for the CPU, and so is its draft; export "
            "for a GPU with device='cuda' (--device cuda), or leave it out."
        )
    if not has_draft:
        return ()
    return ("cuda", "cpu") if wanted == "both" else (device if wanted is None else wanted,)


def check_draft_vocabulary(has_draft: bool, most: int | None, texts: Sequence[str | os.PathLike[str]]) -> None:
    """Raise EdgeSpecError if what is said of the draft's vocabulary is impossible or has no meaning."""
    if most is not None and (isinstance(most, bool) or most < 1):
        raise EdgeSpecError(f"draft_vocab is {most!r}, expected a number of ids above zero.")
    if most is not None and not has_draft:
        raise EdgeSpecError("draft_vocab (--draft-vocab) trims a draft, but there is none; name one, or leave it out.")
    if texts and most is None:
        raise EdgeSpecError(
            "draft_vocab_text (--draft-vocab-text) says which ids to keep; say how many by draft_vocab (--draft-vocab)."
        )


def write_drafts(
    bundle: Path,
    speech: DraftSpeech,
    target: Vocabulary,
    device: Device,
    recipes: Mapping[Device, Recipe],
    check: bool,
    progress: Progress,
) -> tuple[dict[Device, ModelRecord], tuple[str, ...]]:
    """Write a draft into the unfinished folder of a bundle that has none.

    Args:
        bundle: the folder.
        speech: the draft, and how it speaks.
        target: the target's vocabulary.
        device: the target's.
        recipes: how the draft is stored for each device that it is to run on.
        check: compare each written graph with a float32 reference.
        progress: told how far it is.

    Returns:
        Its records by device, and what a person should know of them.
    """
    drafts: dict[Device, ModelRecord] = {}
    notes: list[str] = []
    for runs_on, recipe in recipes.items():
        folder = bundle / DRAFT_FOLDERS[runs_on != device]
        choice = speech.choice(target)
        drafts[runs_on], told = export_measured(
            speech.checkpoint, folder, "draft", recipe, runs_on, check, progress, choice
        )
        notes += told
    speech.write(bundle)
    return drafts, tuple(notes)
