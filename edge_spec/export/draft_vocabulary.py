"""What a draft reads and proposes: whether the target's ids or tokens of its own, and how many of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_spec.errors import EdgeSpecError, PairError
from edge_spec.export.cache_scales import TEXT as MORE_TEXT
from edge_spec.export.checkpoint import Checkpoint, Vocabulary, encode_text
from edge_spec.export.draft_chain_graph import ChoiceOfTokens
from edge_spec.export.optimum_checkpoint import OptimumCheckpoint
from edge_spec.export.progress import Progress
from edge_spec.export.quality import TEXT
from edge_spec.export.respelled_checkpoint import RespelledCheckpoint
from edge_spec.export.token_ranking import expected_shares, ranked
from edge_spec.export.vocabulary_match import Spoken, match_vocabularies, spelled_by
from edge_spec.manifest import DRAFT_IDS, DRAFT_TOKENIZER, DraftVocabularyRecord

# Tokens of text that the ranking reads with the model, and most that it counts.
_READ, _COUNTED = 512, 1 << 22
_LARGEST_FILE = 64 << 20

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftSpeech:
    """How a draft will speak.

    Attributes:
        checkpoint: the draft's, with the rows it is to be written with.
        record: for the manifest; ``None`` if it reads and proposes the target's ids.
        ids: int64 [columns of the logits], what they stand for; ``None`` for one id after the other.
        tokenizer: its own, if it reads the text in tokens of its own.
        notes: what there is to say about it, one sentence each.
    """

    checkpoint: Checkpoint | OptimumCheckpoint
    record: DraftVocabularyRecord | None
    ids: Ids | None
    tokenizer: str | None
    notes: tuple[str, ...]

    def choice(self, target: Vocabulary) -> ChoiceOfTokens | None:
        """What the draft of this target chooses from; ``None`` if it chooses tokens of its own."""
        if self.tokenizer is not None:
            return None
        size = target.size if self.record is None else self.record.size
        return ChoiceOfTokens(size if self.ids is None else len(self.ids), self.ids)

    def write(self, bundle: Path) -> None:
        """Write what belongs to it into the bundle, beside the draft's graphs."""
        if self.record is not None:  # a draft for the CPU alone has another folder
            (bundle / DRAFT_IDS).parent.mkdir(exist_ok=True)
        if self.ids is not None:
            (bundle / DRAFT_IDS).write_bytes(self.ids.astype("<u4").tobytes())
        if self.tokenizer is not None:
            (bundle / DRAFT_TOKENIZER).write_text(self.tokenizer, "utf-8")


def choose_speech(
    target: Spoken,
    draft: Checkpoint | OptimumCheckpoint,
    most: int | None,
    texts: Sequence[str | os.PathLike[str]],
    progress: Progress,
    proposed: Ids | None = None,
) -> DraftSpeech:
    """Decide how a draft speaks with its target.

    Args:
        target: the target's text side.
        draft: the draft's.
        most: ids that the draft proposes at most; ``None`` for all.
        texts: files of text such as the pair will write, whose tokens come first where not all are kept.
        progress: told how far ranking the tokens is.
        proposed: int64, ascending, the ids that the draft proposes; instead of ``most`` of them.

    Raises:
        CheckpointError: a tokenizer fails.
        PairError: the draft comes by way of optimum, whose graph cannot be written in other ids.
        EdgeSpecError: ``most`` is too small, or a text cannot be read.
    """
    match = match_vocabularies(target, draft)
    ours, theirs = target.vocabulary, draft.vocabulary
    own = match.kind == "other tokens"
    spoken = theirs if own else ours
    # The draft's own id behind each id that can be proposed, -1 where there is none.
    rows = np.arange(theirs.size) if own else np.array(match.shared, np.int64)
    ids: Ids = np.flatnonzero(rows >= 0)
    notes = [_note(match.kind, ours, theirs, len(ids))]
    every = len(ids)
    if proposed is not None:
        ids = np.intersect1d(ids, proposed)
    elif most is not None and most < every:
        order = _ranking(_with_rows(draft), "\n".join(map(_read_text, texts)), progress)
        ids = _best(ids, rows, order, most, _needed(spoken))
    if len(ids) < every:
        notes.append(f"Of those, the draft proposes the {len(ids):,} likeliest.")
    elif match.kind == "same":
        return DraftSpeech(draft, None, None, None, tuple(notes))
    names_columns = not (own and len(ids) == theirs.size)
    pieces = spelled_by(ours, draft, match.shared) if match.kind == "other ids" else None
    if names_columns:
        written: Checkpoint | OptimumCheckpoint = RespelledCheckpoint(_with_rows(draft), spoken, rows[ids], pieces)
    else:
        written = draft
    return DraftSpeech(
        written,
        DraftVocabularyRecord("own tokens" if own else "target ids", spoken.size, names_columns),
        ids if names_columns else None,
        theirs.tokenizer.to_str(pretty=True) if own else None,
        tuple(notes),
    )


def _with_rows(draft: Checkpoint | OptimumCheckpoint) -> Checkpoint:
    """A checkpoint whose vocabulary can be written row by row. Raises PairError if it is not."""
    if isinstance(draft, OptimumCheckpoint):
        raise PairError(
            f"{draft.source} cannot be written with a part of its vocabulary, or other ids than its own, by way of "
            "optimum; leave out --draft-vocab, or choose a draft of the target's own model family."
        )
    return draft


def _note(kind: str, ours: Vocabulary, theirs: Vocabulary, shared: int) -> str:
    if kind == "same":
        return f"Target and draft share one tokenizer of {ours.size:,} ids."
    if kind == "other ids":
        return (
            f"The draft numbers its tokens differently: of the target's {ours.size:,} ids it has {shared:,}, "
            "which it is written with."
        )
    return (
        f"Target and draft split text differently ({ours.size:,} and {theirs.size:,} ids), so the draft reads the text "
        "in its own tokens and its text is proposed; a draft of the target's own model family would be faster."
    )


def _ranking(draft: Checkpoint, text: str, progress: Progress) -> Ids:
    """The draft's ids, those first that it is likely to need."""
    vocabulary, facts = draft.vocabulary, draft.architecture
    read = [*encode_text(vocabulary, TEXT, draft.source), *encode_text(vocabulary, MORE_TEXT, draft.source)]
    counted = encode_text(vocabulary, text, draft.source)[:_COUNTED] if text else []
    read = [*counted[: _READ - len(read)], *read] if len(read) < _READ else read
    counts = np.bincount(np.array(counted, np.int64), minlength=facts.logits_size).astype(np.float64)
    counts[read] += 0.5  # what the model read comes next
    shares = expected_shares(draft, np.array(read, np.int64)[: facts.context_length], progress)
    return ranked(shares, counts)


def _needed(vocabulary: Vocabulary) -> list[int]:
    """What is kept in any case: what ends a text, and the single characters that spell everything else."""
    texts = ((token, vocabulary.tokenizer.id_to_token(token)) for token in range(vocabulary.size))
    letters = [token for token, text in texts if text is not None and (len(text) == 1 or _is_byte(text))]
    return [*vocabulary.eos_token_ids, *letters[:256]]


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _best(ids: Ids, rows: Ids, order: Ids, most: int, needed: Sequence[int]) -> Ids:
    """The first ``most`` of ``ids``, ascending, by the order of the rows behind them; those that are needed first."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    must = np.isin(ids, needed)
    if must.sum() > most:
        raise EdgeSpecError(
            f"A draft vocabulary of {most:,} ids is too small; expected at least {must.sum():,}, for the single "
            "characters and what ends a text."
        )
    return np.sort(ids[np.lexsort((rank[rows[ids]], ~must))[:most]])


def _read_text(file: str | os.PathLike[str]) -> str:
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as opened:
            return opened.read(_LARGEST_FILE)
    except OSError as error:
        raise EdgeSpecError(f"The text {str(file)!r} cannot be read: {error.strerror or error}.") from error
