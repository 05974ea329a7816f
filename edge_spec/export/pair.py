"""Exports a target, alone or with its draft, to a pair bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import edge_spec
from edge_spec.bundle import CHAT_TEMPLATE, TOKENIZER, Manifest, ModelRecord, Via, new_bundle, read_manifest
from edge_spec.errors import CheckpointError, EdgeSpecError, PairError
from edge_spec.export.checkpoint import Checkpoint, encode_text, open_checkpoint
from edge_spec.export.model import export_model
from edge_spec.export.optimum_checkpoint import OptimumCheckpoint
from edge_spec.export.optimum_model import export_optimum_model, optimum_recipe
from edge_spec.export.progress import Progress, silent
from edge_spec.export.quality import TEXT
from edge_spec.export.recipe import DEFAULT_RECIPES, Device, Recipe, find_recipe
from edge_spec.manifest_check import LARGEST_TEXT


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: the finished bundle.
        manifest: its manifest.
        notes: decisions a person should know of, one sentence each.
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...]


def export_pair(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    *,
    recipe: str | Recipe | None = None,
    draft_recipe: str | Recipe | None = None,
    device: Device = "cpu",
    context: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    offline: bool = False,
    via: Via = "native",
    draft_via: Via | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Export ``target`` and ``draft`` to a bundle at ``output``; on any error nothing is left there.

    Args:
        target: a GGUF file, a Hugging Face folder or a name on the hub (:func:`open_checkpoint`).
        draft: likewise, or ``None`` for a target alone.
        output: folder of the new bundle.
        recipe: the target's quantization recipe or its name; ``None`` picks the device's default.
        draft_recipe: the draft's, likewise.
        device: ``"cpu"`` or ``"cuda"``, the flavour of the graphs.
        context: positions the target's graphs are made for; ``None`` for what it was trained for.
        check: compare each written graph with a float32 reference on a fixed text.
        overwrite: replace a bundle that is already at ``output``.
        offline: take what is named on the hub from its cache only.
        via: ``"optimum"`` has optimum-onnx export the target, which knows more architectures (docs/optimum.md).
        draft_via: the same for the draft; ``None``: as the target.
        progress: told how far the export is.

    Raises:
        CheckpointError: a source is missing, damaged or not supported.
        PairError: the two models do not share a tokenizer.
        QualityError: a written graph strays too far from the reference.
        BundleError: ``output`` is in the way or cannot be written.
        MissingDependencyError: what ``via`` needs is not installed.
    """
    if device not in DEFAULT_RECIPES:
        raise EdgeSpecError(f"Unknown device {device!r}; expected one of {', '.join(DEFAULT_RECIPES)}.")
    default_target, default_draft = DEFAULT_RECIPES[device]
    draft_via = draft_via or via
    target_recipe = _find_recipe(recipe, default_target, device, via)
    chosen_draft_recipe = _find_recipe(draft_recipe, default_draft, device, draft_via)
    with _memory_errors(), new_bundle(output, overwrite) as (folder, seal):
        target_checkpoint = _open(target, via, context, offline)
        draft_checkpoint = None if draft is None else _open(draft, draft_via, None, offline)
        vocabulary = target_checkpoint.vocabulary
        notes = _vocabulary_notes(target_checkpoint, draft_checkpoint)
        # Not by the tokenizer's own save, whose errors (a full disk) have no type.
        (folder / TOKENIZER).write_text(vocabulary.tokenizer.to_str(pretty=True), "utf-8")
        if vocabulary.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_bytes(_checked_template(vocabulary.chat_template, target_checkpoint.source))
        target_record = _export(target_checkpoint, folder / "target", target_recipe, device, check, progress)
        draft_record = None
        if draft_checkpoint is not None:
            draft_record = _export(draft_checkpoint, folder / "draft", chosen_draft_recipe, device, check, progress)
        progress("seal", 0, 1)
        seal(
            Manifest(
                created_by=f"edge-spec {edge_spec.__version__}",
                device=device,
                vocab_size=vocabulary.size,
                context_length=target_checkpoint.architecture.context_length,
                eos_token_ids=vocabulary.eos_token_ids,
                bos_token_id=vocabulary.bos_token_id,
                special_token_ids=vocabulary.special_token_ids,
                named_tokens=dict(vocabulary.named_tokens),
                default_sampling=dict(target_checkpoint.default_sampling),
                target=target_record,
                draft=draft_record,
                files={},
            )
        )
        progress("seal", 1, 1)
    return ExportReport(Path(output), read_manifest(Path(output)), notes)


def _find_recipe(recipe: str | Recipe | None, default: str, device: Device, via: Via) -> Recipe:
    return optimum_recipe(recipe, device) if via == "optimum" else find_recipe(recipe or default, device)


def _open(
    source: str | os.PathLike[str], via: Via, context: int | None, offline: bool
) -> Checkpoint | OptimumCheckpoint:
    if via == "optimum":
        return OptimumCheckpoint(source, context, offline)
    return open_checkpoint(source, context, offline)


def _export(
    checkpoint: Checkpoint | OptimumCheckpoint,
    folder: Path,
    recipe: Recipe,
    device: Device,
    check: bool,
    progress: Progress,
) -> ModelRecord:
    if isinstance(checkpoint, OptimumCheckpoint):
        return export_optimum_model(checkpoint, folder, recipe, check, progress)
    return export_model(checkpoint, folder, recipe, device, check, progress)


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise EdgeSpecError("There is not enough memory to export this; nothing was written.") from error


def _checked_template(template: str, source: str) -> bytes:
    try:
        content = template.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the chat template of {source} is no text: {error.reason}") from None
    if len(content) > LARGEST_TEXT:
        raise CheckpointError(f"the chat template of {source} is longer than {LARGEST_TEXT:,} bytes")
    return content


def _vocabulary_notes(
    target: Checkpoint | OptimumCheckpoint, draft: Checkpoint | OptimumCheckpoint | None
) -> tuple[str, ...]:
    """Return what there is to say about the ids that both models may use. Raises PairError if those differ."""
    rows, size = target.architecture.vocab_size, target.vocabulary.size
    notes = []
    if draft is not None:
        _require_same_tokenizer(target, draft)
        notes.append(f"Target and draft share one tokenizer of {size:,} ids.")
        draft_rows = draft.architecture.vocab_size
        if draft_rows != rows:
            notes.append(f"Their vocabularies are padded to {rows:,} and {draft_rows:,} rows.")
    if size < rows:
        notes.append(f"Ids {size:,} to {rows - 1:,} are padding and are never sampled.")
    return tuple(notes)


def _require_same_tokenizer(target: Checkpoint | OptimumCheckpoint, draft: Checkpoint | OptimumCheckpoint) -> None:
    drafts, targets = draft.vocabulary.tokenizer, target.vocabulary.tokenizer
    theirs, ours = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (drafts, targets))
    if theirs != ours:
        differing = min(index for _, index in ours.items() ^ theirs.items())
        raise PairError(
            f"Target and draft have different tokenizers: {len(ours):,} and {len(theirs):,} tokens, the first "
            f"difference at id {differing} ({targets.id_to_token(differing)!r} and "
            f"{drafts.id_to_token(differing)!r}). Choose a draft of the target's own model family."
        )
    if encode_text(target.vocabulary, TEXT, target.source) != encode_text(draft.vocabulary, TEXT, draft.source):
        raise PairError(
            "Target and draft have the same tokens but split text differently. "
            "Choose a draft of the target's own model family."
        )
