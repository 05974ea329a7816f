"""Messages of a conversation, as OpenAI writes them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from edge_spec.serve.fields import LenientFields


class Part(LenientFields):
    """A part of a message's content; only text can be read."""

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _require_text(cls, kind: str) -> str:
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"parts of type {kind[:40]!r} are not supported, since the model reads text alone")
        return kind


class CalledFunction(LenientFields):
    """What a tool call calls; the arguments are JSON."""

    name: str
    arguments: str


class CalledTool(LenientFields):
    """A tool call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(LenientFields):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = None

    def text(self) -> str | None:
        """Return the content as one text; ``None`` if there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates are written for."""
        message: dict[str, Any] = {
            # Templates know the role by its older name.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text(),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # Templates write arguments as JSON themselves.
                    "function": {"name": call.function.name, "arguments": _read(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
            message["content"] = message["content"] or ""
        return message


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation in the form that chat templates are written for."""
    return [message.for_template() for message in messages]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
