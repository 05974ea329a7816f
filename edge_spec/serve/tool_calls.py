"""Finds tool calls in what a model writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

That is how models of the Hermes and Qwen kind call tools. What others write stays text.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call.

    Attributes:
        name: the function.
        arguments: JSON.
        id: a name for this call.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallReader:
    """Divides a growing text into content and calls.

    Content is given out as soon as it cannot belong to a call. A call is given out as a whole; what looks like one and
    is not remains content, as it was written.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._text = ""  # not given out yet
        self._inside = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text. Returns the content and the calls that are complete by that."""
        self._text += text
        content = ""
        found: list[ToolCall] = []
        while True:
            if not self._inside:
                start = self._text.find(OPEN)
                if start < 0:
                    keep = _held(self._text)
                    content += self._text[: len(self._text) - keep]
                    self._text = self._text[len(self._text) - keep :]
                    return content, found
                before = self._text[:start].rstrip()
                content += before
                self._text = self._text[len(before) :]
                self._inside = True
            end = self._text.find(CLOSE)
            if end < 0:
                return content, found
            written, self._text = self._text[: end + len(CLOSE)], self._text[end + len(CLOSE) :]
            self._inside = False
            call = read_call(written.lstrip()[len(OPEN) : -len(CLOSE)])
            if call is None:
                content += written
            else:
                self.calls.append(call)
                found.append(call)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the text. Returns the rest of the content, or a call that was not closed."""
        rest, self._text = self._text, ""
        call = read_call(rest.lstrip()[len(OPEN) :]) if self._inside else None
        if call is not None:
            self.calls.append(call)
            return "", [call]
        return ("" if self.calls and not rest.strip() else rest), []


def read_call(text: str) -> ToolCall | None:
    """Read what is between the marks; ``None`` if it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON within JSON
        return ToolCall(call["name"], arguments)
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _held(text: str) -> int:
    """Characters at the end that may begin a call, white space in front of it included."""
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if text.endswith(OPEN[:length]):
            break
    else:
        length = 0
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
