"""What ``/v1/completions`` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.serve.answer import (
    Envelope,
    Event,
    extension,
    extensions,
    finish_reason,
    shown_logprobs,
    token_details,
)
from edge_spec.serve.completion_request import CompletionRequest
from edge_spec.serve.logprob_shapes import LogprobShapes


class CompletionAnswer:
    """Puts completions into the shape of the older API."""

    def __init__(self, request: CompletionRequest, model: str, shapes: LogprobShapes, ends: frozenset[int]) -> None:
        """Answer one request.

        Args:
            request: what was asked.
            model: the model's name.
            shapes: writes log-probabilities.
            ends: tokens that end a text and are no part of it.
        """
        self.envelope = Envelope(
            "cmpl", "text_completion", "text_completion", model, len(request.prompts()), request.choices
        )
        self._logprobs, self._details = request.logprobs is not None, bool(request.token_details)
        self._shapes, self._ends = shapes, ends
        self._offsets = [0 for _ in self.envelope.indices]

    def opening(self) -> list[Event]:
        """Say nothing before there is text."""
        return []

    def piece(self, index: int, chunk: Chunk) -> list[Event]:
        """Return what a chunk adds, and after the last one why it was the last."""
        events = []
        logprobs = None
        if self._logprobs and (shown := shown_logprobs(chunk.logprobs, self._ends)):
            logprobs, self._offsets[index] = self._shapes.completion(shown, self._offsets[index])
        details = token_details(chunk) if self._details else []
        if chunk.text or logprobs or details:
            event = self.envelope.piece(_choice(index, chunk.text, logprobs, None))
            events.append({**event, "edge_spec": {"tokens": details}} if details else event)
        if chunk.completion is not None:
            end = self.envelope.piece(_choice(index, "", None, finish_reason(chunk.completion)))
            events.append({**end, "edge_spec": extension(chunk.completion)})
        return events

    def whole(self, completions: Sequence[Completion]) -> Event:
        """Return all texts."""
        choices = []
        for index, completion in enumerate(completions):
            logprobs = None
            if self._logprobs:
                logprobs, _ = self._shapes.completion(shown_logprobs(completion.logprobs, self._ends), 0)
            choices.append(_choice(index, completion.text, logprobs, finish_reason(completion)))
        return {
            **self.envelope.whole(choices),
            "usage": self.envelope.usage(completions),
            "edge_spec": extensions(completions),
        }


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
