"""What ``/v1/chat/completions`` answers."""

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
from edge_spec.serve.chat_request import ChatRequest
from edge_spec.serve.logprob_shapes import LogprobShapes
from edge_spec.serve.tool_calls import ToolCall, ToolCallReader


class ChatAnswer:
    """Puts completions into the shape of the chat API."""

    def __init__(self, request: ChatRequest, model: str, shapes: LogprobShapes, ends: frozenset[int]) -> None:
        """Answer one request.

        Args:
            request: what was asked.
            model: the model's name.
            shapes: writes log-probabilities.
            ends: tokens that end a text and are no part of it.
        """
        self.envelope = Envelope("chatcmpl", "chat.completion", "chat.completion.chunk", model, 1, request.choices)
        self._logprobs, self._details = bool(request.logprobs), bool(request.token_details)
        self._shapes, self._ends = shapes, ends
        self._reads_calls = bool(request.offered_tools())
        self._readers = [ToolCallReader() for _ in self.envelope.indices]

    def opening(self) -> list[Event]:
        """Say who speaks, once for each choice."""
        return [
            self.envelope.piece(_choice(index, {"role": "assistant", "content": ""})) for index in self.envelope.indices
        ]

    def piece(self, index: int, chunk: Chunk) -> list[Event]:
        """Return what a chunk adds, and after the last one why it was the last."""
        reader = self._readers[index]
        known = len(reader.calls)
        content, calls = (reader.push(chunk.text)) if self._reads_calls else (chunk.text, [])
        if chunk.completion is not None and self._reads_calls:
            rest, late = reader.finish()
            content, calls = content + rest, [*calls, *late]
        deltas: list[dict[str, Any]] = [{"content": content}] if content else []
        deltas += [{"tool_calls": [_call(call, known + number)]} for number, call in enumerate(calls)]
        logprobs = shown_logprobs(chunk.logprobs, self._ends) if self._logprobs else []
        details = token_details(chunk) if self._details else []
        if not deltas and (logprobs or details):
            deltas.append({"content": ""})
        events = [self.envelope.piece(_choice(index, delta)) for delta in deltas]
        if logprobs:
            events[0]["choices"][0]["logprobs"] = self._shapes.chat(logprobs)
        if details:
            events[0]["edge_spec"] = {"tokens": details}
        if chunk.completion is not None:
            reason = "tool_calls" if reader.calls else finish_reason(chunk.completion)
            end = self.envelope.piece(_choice(index, {}, reason))
            events.append({**end, "edge_spec": extension(chunk.completion)})
        return events

    def whole(self, completions: Sequence[Completion]) -> Event:
        """Return all messages."""
        choices = [self._message(index, completion) for index, completion in enumerate(completions)]
        return {
            **self.envelope.whole(choices),
            "usage": self.envelope.usage(completions),
            "edge_spec": extensions(completions),
        }

    def _message(self, index: int, completion: Completion) -> dict[str, Any]:
        content, calls = completion.text, []
        if self._reads_calls:
            reader = ToolCallReader()
            before, _ = reader.push(completion.text)
            after, _ = reader.finish()
            content, calls = before + after, reader.calls
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = None
        if self._logprobs:
            logprobs = self._shapes.chat(shown_logprobs(completion.logprobs, self._ends))
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else finish_reason(completion),
        }


def _choice(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """Write a call; in a stream they are numbered."""
    number = {} if index is None else {"index": index}
    return {
        **number,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
