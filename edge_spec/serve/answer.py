"""What the two kinds of answers have in common: who wrote them, what they cost, how they ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import edge_spec
from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.logprobs import TokenLogprobs

# OpenAI knows no others. What was cancelled is told as an error.
_FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop"}

Event = dict[str, Any]


class Answer(Protocol):
    """Puts completions into the shape of one endpoint."""

    envelope: Envelope

    def opening(self) -> list[Event]:
        """What a stream begins with."""
        ...

    def piece(self, index: int, chunk: Chunk) -> list[Event]:
        """What a chunk of an answer adds to a stream, its end included; ``index`` counts the answers."""
        ...

    def whole(self, completions: Sequence[Completion]) -> Event:
        """All answers at once."""
        ...


class Envelope:
    """What is around the choices of every answer."""

    def __init__(self, prefix: str, kind: str, chunk_kind: str, model: str, prompts: int, choices: int) -> None:
        """Begin an answer.

        Args:
            prefix: what its id begins with.
            kind: what OpenAI calls the object as a whole.
            chunk_kind: what it calls a piece of it.
            model: the model's name.
            prompts: how many prompts are answered.
            choices: how many answers each of them gets.
        """
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._kind, self._chunk_kind = kind, chunk_kind
        self._choices = choices
        self.indices = range(prompts * choices)
        self._fields = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"edge-spec-{edge_spec.__version__}",
        }

    def whole(self, choices: list[dict[str, Any]]) -> Event:
        """Return an object with all choices."""
        return {**self._fields, "object": self._kind, "choices": choices}

    def piece(self, *choices: dict[str, Any]) -> Event:
        """Return an object of a stream with what these choices have got."""
        return {**self._fields, "object": self._chunk_kind, "choices": list(choices)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Count tokens. A prompt counts once, however many answers it got."""
        first_answers = [completion.statistics for completion in completions[:: self._choices]]
        prompt_tokens = sum(statistics.prompt_tokens for statistics in first_answers)
        new_tokens = sum(completion.statistics.new_tokens for completion in completions)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in first_answers)},
        }


def finish_reason(completion: Completion) -> str:
    """Return why a text ended, in OpenAI's words."""
    return _FINISH_REASONS[completion.finish_reason]


def extension(completion: Completion) -> dict[str, Any]:
    """Return what a completion cost and how it ended, in edge-spec's words."""
    return {"statistics": completion.statistics.to_dict(), "finish_reason": completion.finish_reason}


def extensions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return that of the first completion, and if there are several, of all of them."""
    first = extension(completions[0])
    return first if len(completions) == 1 else {**first, "choices": [extension(one) for one in completions]}


def token_details(chunk: Chunk) -> list[dict[str, Any]]:
    """Return who proposed each token of a chunk, and which text it made final."""
    return [
        {"id": token, "text": text, "drafter": origin}
        for token, text, origin in zip(chunk.token_ids, chunk.pieces, chunk.origins, strict=False)
    ]


def shown_logprobs(logprobs: Sequence[TokenLogprobs] | None, ends: frozenset[int]) -> list[TokenLogprobs]:
    """Return those of the tokens that are part of the text: not that of the one that ends it."""
    return [entry for entry in logprobs or () if entry.token_id not in ends]
