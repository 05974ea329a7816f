"""What can be known to be wrong with a run before the target writes for hours."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from edge_spec.bundle import open_bundle, require_replaceable
from edge_spec.distill.chat_frame import chat_frame
from edge_spec.distill.head_student import head_to_begin_with
from edge_spec.distill.tap_files import HEADER, TapFiles
from edge_spec.distill.tiny_student import tiny_to_begin_with
from edge_spec.distill.train_settings import Kind, TrainSettings
from edge_spec.distill.trainer import require_device
from edge_spec.distill.training_state import STATE, TrainingState
from edge_spec.distill.write_texts import TEXTS_PER_FILE, check_batch, default_taps
from edge_spec.errors import CheckpointError, EdgeSpecError, RequestError
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.manifest import Manifest
from edge_spec.runtime.prompt import PromptEncoder
from edge_spec.runtime.tokenizer import TextTokenizer

# Sizes in which a checkpoint and the model that was made from it agree, however the checkpoint is stored.
_SIZES = ("layers", "hidden_size", "heads", "kv_heads", "head_size")
_MOST_THREADS = 256
# That a text takes: some ten tokens with what is likely after them.
_FEWEST_BYTES = 4096


@dataclass(frozen=True)
class WantedTexts:
    """What the target is to write.

    Attributes:
        folder: where to.
        tokens: of answers.
        limit_bytes: most that they may take on disk.
        prompts: how many there are.
        shipped: whether they are those that ship.
    """

    folder: Path
    tokens: int
    limit_bytes: int
    prompts: int
    shipped: bool

    def require_room(self) -> None:
        """Raise RequestError for a disk limit that not even the first texts can be below."""
        begun = (self.folder / HEADER).exists()  # what is there is learnt from, if no more may come
        if not begun and self.limit_bytes < TEXTS_PER_FILE * _FEWEST_BYTES:
            raise self.no_room()

    def no_room(self) -> RequestError:
        """The error of a disk limit that the first texts do not fit below."""
        return RequestError(
            f"The disk limit of {self.limit_bytes:,} bytes leaves no room for the first texts; allow more (--disk)."
        )


def check_run(
    bundle: Path,
    manifest: Manifest,
    checkpoint: str,
    work: Path,
    output: Path | None,
    overwrite: bool,
    settings: TrainSettings,
    threads: int | None,
    batch: int,
    texts: WantedTexts,
) -> None:
    """Raise EdgeSpecError for what would end the run later.

    Args:
        bundle: whose target writes, and ``manifest`` what it says of itself.
        manifest: see there.
        checkpoint: the target's.
        work: working folder.
        output: folder of the bundle with the draft; ``None`` for the bundle's own.
        overwrite: replace another bundle that is there, or the draft of another run in the bundle.
        settings: of the training.
        threads: of the CPU.
        batch: texts that the target writes at a time.
        texts: what is to be written.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise EdgeSpecError(f"threads is {threads}, expected 1 to {_MOST_THREADS}; one per physical core is best.")
    require_device(settings.device)
    check_batch(batch)
    texts.require_room()
    _require_own_draft(bundle, manifest, work / settings.kind, settings.kind, overwrite or output is not None)
    if texts.shipped:
        _require_chats(bundle)
    for folder in (bundle, *([] if output is None else [output])):
        if Path(os.path.realpath(work)).is_relative_to(os.path.realpath(folder)):
            raise EdgeSpecError(f"The working folder {work} lies in the bundle {folder}; name another (--work).")
    require_replaceable(bundle if output is None else output, overwrite or output is None)
    _require_writable(Path(os.path.realpath(bundle) if output is None else output).absolute().parent)
    opened = open_checkpoint(checkpoint)
    facts, expected = opened.architecture, manifest.target.architecture
    for name in _SIZES:
        if getattr(facts, name) != getattr(expected, name):
            raise CheckpointError(
                f"{checkpoint} has {name} {getattr(facts, name):,}, but the target of {bundle} has "
                f"{getattr(expected, name):,}; give the checkpoint that the bundle was exported from (--target)."
            )
    if opened.vocabulary.size != manifest.vocab_size:
        raise CheckpointError(
            f"{checkpoint} has {opened.vocabulary.size:,} ids, but the target of {bundle} has "
            f"{manifest.vocab_size:,}; give the checkpoint that the bundle was exported from (--target)."
        )
    if settings.kind == "head":
        checkpoint_of(replace(manifest.target, source=checkpoint), "lm_head")  # for the bundle, in the end
        head_to_begin_with(opened, default_taps(facts.layers), settings)
    else:
        tiny_to_begin_with(opened, settings)
    TrainingState.check(work / settings.kind, {**settings.fixed(), "target": opened.sha256()})
    if (work / settings.kind / STATE).exists():
        _require_no_more(texts, work / settings.kind)


def _require_own_draft(bundle: Path, manifest: Manifest, draft: Path, kind: Kind, replaced: bool) -> None:
    """Raise EdgeSpecError if the bundle has a draft of this kind that another run has made, and may not lose it."""
    head = None if manifest.head is None else manifest.head.model
    there = head if kind == "head" else next(iter(manifest.drafts.values()), None)
    if there is None or replaced or os.path.realpath(there.source) == os.path.realpath(draft):
        return
    called = "head" if kind == "head" else "draft model"
    raise EdgeSpecError(
        f"{bundle} has a {called} already, from {there.source}, whose place the new one would take; write the new "
        "bundle to another place (--output), or give that one up (--overwrite)."
    )


def _require_chats(bundle: Path) -> None:
    """Raise RequestError if the prompts that ship cannot be asked, of which the target writes some itself."""
    opened = open_bundle(bundle, verify=False)
    tokenizer = TextTokenizer(opened.tokenizer_path)
    encoder = PromptEncoder(tokenizer, opened.manifest, opened.chat_template(), opened.manifest.context_length)
    try:
        chat_frame(encoder.encode)
    except RequestError as error:
        raise RequestError(
            f"The prompts that ship are chats, which cannot be held with {bundle}: {error} Give prompts of your own, "
            "as text (--prompts)."
        ) from None


def _require_no_more(texts: WantedTexts, draft: Path) -> None:
    """Raise RequestError if more texts were to come to those that a draft has begun to learn from."""
    there = TapFiles(texts.folder)
    two_files = 2 * TEXTS_PER_FILE * there.stored_bytes // max(len(there), 1)
    has_room = there.stored_bytes + two_files <= texts.limit_bytes
    if there.answer_tokens < texts.tokens and len(there) < texts.prompts and has_room:
        raise RequestError(
            f"The draft in {draft} has begun to learn from {there.answer_tokens:,} tokens of answers, and is to have "
            f"{texts.tokens:,}; ask for {there.answer_tokens} (--tokens), or name another working folder (--work) and "
            f"go on from that draft there (--start-from {draft})."
        )


def _require_writable(folder: Path) -> None:
    """Raise EdgeSpecError if nothing can be made in a folder, or in the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EdgeSpecError(
            f"{folder} cannot be written, so the bundle could not be put there; name another place (--output)."
        )
