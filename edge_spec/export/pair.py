"""Exports a target, alone or with its draft, to a pair bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import edge_spec
from edge_spec.bundle import new_bundle, read_manifest
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.draft_place import DraftDevice, check_draft_vocabulary, draft_devices, write_drafts
from edge_spec.export.draft_vocabulary import choose_speech
from edge_spec.export.heads.head_folder import open_head_folder
from edge_spec.export.heads.write_head import write_head
from edge_spec.export.measured_model import AnyCheckpoint, export_measured, memory_errors, open_for, recipe_for
from edge_spec.export.progress import Progress, silent
from edge_spec.export.recipe import AUTO, DEFAULT_HEAD_RECIPES, DEFAULT_RECIPES, Device, Recipe, find_recipe
from edge_spec.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest, ModelRecord, Via
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
    draft_device: DraftDevice | None = None,
    context: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    offline: bool = False,
    via: Via = "native",
    draft_via: Via | None = None,
    draft_vocab: int | None = None,
    draft_vocab_text: Sequence[str | os.PathLike[str]] = (),
    head: str | os.PathLike[str] | None = None,
    head_recipe: str | Recipe | None = None,
    taps: Sequence[int] = (),
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
        draft_device: the same for the draft beside a target for CUDA, or ``"both"``, so that loading can choose;
            ``None``: as the target.
        context: positions the target's graphs are made for; ``None`` for what it was trained for.
        check: compare each written graph with a float32 reference on a fixed text.
        overwrite: replace a bundle that is already at ``output``.
        offline: take what is named on the hub from its cache only.
        via: ``"optimum"`` has optimum-onnx export the target, which knows more architectures (docs/optimum.md).
        draft_via: the same for the draft; ``None``: as the target.
        draft_vocab: ids that the draft proposes at most; ``None`` for all (docs/drafts.md).
        draft_vocab_text: files of text such as the pair will write, which say what ids those should be.
        head: a head that drafts from the target's hidden states (docs/heads.md), a folder or a name on the hub.
        head_recipe: how it is stored; ``None`` picks the device's default.
        taps: behind how many of its layers the target tells its hidden states. With a head, those that it reads, in the
            order of its weights, if its checkpoint does not say or says it wrongly.
        progress: told how far the export is.

    Raises:
        CheckpointError: a source is missing, damaged or not supported.
        PairError: the draft cannot be written in what the target reads.
        QualityError: a written graph strays too far from the reference.
        BundleError: ``output`` is in the way or cannot be written.
        MissingDependencyError: what ``via`` needs is not installed.
    """
    if device not in DEFAULT_RECIPES:
        raise EdgeSpecError(f"Unknown device {device!r}; expected one of {', '.join(DEFAULT_RECIPES)}.")
    places = draft_devices(draft_device, device, draft is not None)
    draft_via = draft_via or via
    target_recipe = recipe_for(recipe, DEFAULT_RECIPES[device][0], device, via)
    draft_recipes = {
        runs_on: recipe_for(draft_recipe, DEFAULT_RECIPES[runs_on][1], runs_on, draft_via) for runs_on in places
    }
    if not places:  # a slip in its recipe is told even where there is no draft
        recipe_for(draft_recipe, DEFAULT_RECIPES[device][1], device, draft_via)
    if not check and AUTO in (target_recipe, *draft_recipes.values()):
        raise EdgeSpecError(
            "Recipe 'auto' chooses formats by their measured error, which needs the check of the written graph; leave "
            "the check in (no --no-check), or name a recipe such as w8a8 or int4."
        )
    if taps and via == "optimum":
        raise EdgeSpecError(
            "taps (--taps) are told by the exporter's own graphs; export the target without via='optimum'."
        )
    check_draft_vocabulary(draft is not None, draft_vocab, draft_vocab_text)
    stored_head = find_recipe(head_recipe or DEFAULT_HEAD_RECIPES[device], device)
    if head is not None and via == "optimum":
        raise EdgeSpecError(
            "A head (--head) reads hidden states, which the exporter's own graphs tell; export the target without "
            "via='optimum'."
        )
    with memory_errors(), new_bundle(output, overwrite) as (folder, seal):
        head_folder = None if head is None else open_head_folder(head, offline)
        target_checkpoint = open_for(target, via, context, offline)
        draft_checkpoint = None if draft is None else open_for(draft, draft_via, None, offline)
        vocabulary = target_checkpoint.vocabulary
        notes = list(_padding_notes(target_checkpoint, draft_checkpoint))
        speech = None
        if draft_checkpoint is not None:
            speech = choose_speech(target_checkpoint, draft_checkpoint, draft_vocab, draft_vocab_text, progress)
            notes = [*speech.notes, *notes]
        # Not by the tokenizer's own save, whose errors (a full disk) have no type.
        (folder / TOKENIZER).write_text(vocabulary.tokenizer.to_str(pretty=True), "utf-8")
        if vocabulary.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_bytes(_checked_template(vocabulary.chat_template, target_checkpoint.source))
        requested = (*((recipe,) if device == "cuda" else ()), *((draft_recipe,) if "cuda" in places else ()))
        if any(asked in (AUTO, AUTO.name) for asked in requested):
            notes.append("Recipe auto is int4 on CUDA, which has no w8a8 to choose from; nothing was measured.")
        target_record, told = export_measured(
            target_checkpoint,
            folder / "target",
            "target",
            target_recipe,
            device,
            check,
            progress,
            taps=() if head_folder is not None else taps,
        )
        notes += told
        drafts: dict[Device, ModelRecord] = {}
        if speech is not None:
            drafts, told = write_drafts(folder, speech, vocabulary, device, draft_recipes, check, progress)
            notes += told
        manifest = Manifest(
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
            draft=drafts.get(device),
            files={},
            draft_vocabulary=None if speech is None else speech.record,
            cpu_draft=drafts.get("cpu") if device == "cuda" else None,
        )
        if head_folder is not None:
            manifest = write_head(folder, manifest, head_folder, stored_head, taps or None, progress)
        progress("seal", 0, 1)
        seal(manifest)
        progress("seal", 1, 1)
    return ExportReport(Path(output), read_manifest(Path(output)), tuple(notes))


def _checked_template(template: str, source: str) -> bytes:
    try:
        content = template.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the chat template of {source} is no text: {error.reason}") from None
    if len(content) > LARGEST_TEXT:
        raise CheckpointError(f"the chat template of {source} is longer than {LARGEST_TEXT:,} bytes")
    return content


def _padding_notes(target: AnyCheckpoint, draft: AnyCheckpoint | None) -> Iterator[str]:
    """What there is to say about rows of the vocabularies that are no ids."""
    rows, size = target.architecture.logits_size, target.vocabulary.size
    if draft is not None and draft.architecture.logits_size != rows:
        yield f"Their vocabularies are padded to {rows:,} and {draft.architecture.logits_size:,} rows."
    if size < rows:
        yield f"Ids {size:,} to {rows - 1:,} are padding and are never sampled."
