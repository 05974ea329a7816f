"""What a generation gives: chunks while it runs, a completion when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_spec.runtime.logprobs import TokenLogprobs
from edge_spec.runtime.statistics import Statistics

FinishReason = Literal["stop", "length", "deadline", "cancelled"]


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: the new text, without special tokens and the end-of-text token, cut before a stop string.
        token_ids: every emitted token, the end-of-text token included.
        finish_reason: ``"stop"`` for an end-of-text token, a stop token or a stop string, ``"length"`` for a full
            context or ``max_new_tokens``, ``"deadline"`` when the time was over, ``"cancelled"`` when the caller
            said so.
        statistics: what it cost.
        logprobs: one for each of ``token_ids``; ``None`` if they were not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**asdict(self), "statistics": self.statistics.to_dict()}


@dataclass(frozen=True)
class Chunk:
    """What one round added to the text.

    Attributes:
        text: text that became final, possibly none: a token may end within a character or a stop string.
        token_ids: the tokens the round emitted.
        origins: who proposed each of them: a drafter's name (``"ngram"`` for what the suffix drafter knows from other
            texts, ``"deferred"`` for what a branch of the round before told), or ``"target"``.
        completion: the whole generation; only on the last chunk.
        logprobs: one for each of ``token_ids``; ``None`` if they were not asked for.
        pieces: the text that each of ``token_ids`` made final, possibly none. Together they are ``text``, unless that
            ends with what was held back when its time was over.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    pieces: tuple[str, ...] = ()


def last_completion(chunks: Iterator[Chunk]) -> Completion:
    """Read a stream to its end and return the completion that its last chunk carries."""
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None  # every stream ends with one
    return completion
