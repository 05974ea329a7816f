"""What the tokenizers of a target and its draft have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from edge_spec.export.cache_scales import TEXT as MORE_TEXT
from edge_spec.export.checkpoint import Vocabulary, encode_text
from edge_spec.export.quality import TEXT

Kind = Literal["same", "other ids", "other tokens"]


class Spoken(Protocol):
    """A checkpoint, as far as its text side goes."""

    source: str

    @property
    def vocabulary(self) -> Vocabulary:
        """The text side."""
        ...


@dataclass(frozen=True)
class VocabularyMatch:
    """How the tokenizers of a pair compare.

    Attributes:
        kind: ``"same"`` tokens with the same ids; the same split into tokens that may have ``"other ids"`` or be known
            to one side only; or ``"other tokens"``, another split.
        shared: the draft's id for each of the target's, -1 where it has none.
    """

    kind: Kind
    shared: tuple[int, ...]


def match_vocabularies(target: Spoken, draft: Spoken) -> VocabularyMatch:
    """Compare two tokenizers, by their tokens and by how they split some text.

    Raises:
        CheckpointError: one of them fails.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    ids = theirs.tokenizer.get_vocab(with_added_tokens=True)
    texts = (ours.tokenizer.id_to_token(token) for token in range(ours.size))
    found = (-1 if text is None else ids.get(text, -1) for text in texts)
    shared = tuple(token if token < theirs.size else -1 for token in found)
    if _split(target) != _split(draft):
        return VocabularyMatch("other tokens", shared)
    same = ids == ours.tokenizer.get_vocab(with_added_tokens=True)
    return VocabularyMatch("same" if same else "other ids", shared)


def spelled_by(target: Vocabulary, draft: Spoken, shared: Sequence[int]) -> list[list[int]]:
    """For each id of the target, the draft's tokens that spell it: its own, or as it splits the text; none for markers.

    Raises:
        CheckpointError: the draft's tokenizer fails.
    """
    special = set(target.special_token_ids)

    def pieces(token: int) -> list[int]:
        if shared[token] >= 0:
            return [shared[token]]
        text = "" if token in special else target.tokenizer.decode([token])
        ids = encode_text(draft.vocabulary, text, draft.source) if text else []
        return [piece for piece in ids if piece < draft.vocabulary.size]

    return [pieces(token) for token in range(target.size)]


def _split(checkpoint: Spoken) -> list[str | None]:
    """The texts of the tokens of a text, which are the same for tokenizers that only number them differently."""
    vocabulary = checkpoint.vocabulary
    ids = encode_text(vocabulary, TEXT + MORE_TEXT, checkpoint.source)
    return [vocabulary.tokenizer.id_to_token(token) for token in ids]
