"""Exports one model by whatever way and recipe it is to go, and says what was found out on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_spec.errors import EdgeSpecError
from edge_spec.export.auto_recipe import Role, choose_recipe
from edge_spec.export.checkpoint import Checkpoint, open_checkpoint
from edge_spec.export.draft_chain_graph import ChoiceOfTokens
from edge_spec.export.model import export_model
from edge_spec.export.optimum_checkpoint import OptimumCheckpoint
from edge_spec.export.optimum_model import export_optimum_model, optimum_recipe
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import AUTO, Device, Recipe, find_recipe
from edge_spec.manifest import ModelRecord, Via

AnyCheckpoint = Checkpoint | OptimumCheckpoint


def recipe_for(recipe: str | Recipe | None, default: str, device: Device, via: Via) -> Recipe:
    """Return the recipe that is asked for, or the one named ``default``. Raises EdgeSpecError if there is none such."""
    return optimum_recipe(recipe, device) if via == "optimum" else find_recipe(recipe or default, device)


def open_for(source: str | os.PathLike[str], via: Via, context: int | None, offline: bool) -> AnyCheckpoint:
    """Open a checkpoint for the exporter that is to write it; see :func:`open_checkpoint`."""
    if via == "optimum":
        return OptimumCheckpoint(source, context, offline)
    return open_checkpoint(source, context, offline)


def export_measured(
    checkpoint: AnyCheckpoint,
    folder: Path,
    role: Role,
    recipe: Recipe,
    device: Device,
    check: bool,
    progress: Progress,
    choice: ChoiceOfTokens | None = None,
    taps: Sequence[int] = (),
) -> tuple[ModelRecord, tuple[str, ...]]:
    """Export one model, by a recipe that is chosen first if it is auto, and say what was found out on the way.

    The arguments are those of :func:`~edge_spec.export.model.export_model`, and the model's ``role``.
    """
    if isinstance(checkpoint, OptimumCheckpoint):  # its recipes are never auto
        return export_optimum_model(checkpoint, folder, recipe, check, progress), ()
    if recipe != AUTO:
        return export_model(checkpoint, folder, recipe, device, check, progress, choice, taps), ()
    chosen = choose_recipe(checkpoint, folder, role, progress)
    record = export_model(checkpoint, folder, chosen.recipe, device, check, progress, choice, taps)
    assert record.quality is not None  # auto asks for the check
    return record, (*chosen.notes, *chosen.warnings(record.quality.mean_kl))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Say what it is if the memory is not enough."""
    try:
        yield
    except MemoryError as error:
        raise EdgeSpecError("There is not enough memory to export this; nothing was written.") from error
