"""What ``/v1/chat/completions`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from edge_spec.serve.api_error import ApiError
from edge_spec.serve.fields import Fields, LenientFields
from edge_spec.serve.generation_fields import GenerationFields
from edge_spec.serve.grammar_choice import grammar_of
from edge_spec.serve.messages import ChatMessage, for_template

_TOOL_CALL_END = "</tool_call>"


class FunctionFields(LenientFields):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionFields


class JsonSchema(LenientFields):
    """A schema that the answer has to obey."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationFields):
    """What ``/v1/chat/completions`` takes."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**63)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**63)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True

    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "modalities": (["text"], []),
        "audio": (),
        "functions": ([],),
        "function_call": ("none",),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    }

    def require_supported(self, model: str) -> None:
        """As for every completion; tools have to be such as the model is free to call."""
        super().require_supported(model)
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400,
                "tool_choice can be 'auto' or 'none' here; the model cannot be made to call a tool.",
                "tool_choice",
                "unsupported",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", "top_logprobs", "invalid_value")
        if self.offered_tools() and self.constrained:
            raise ApiError(
                400,
                "An answer that has to have a certain form cannot call tools; leave out response_format and grammar, "
                "or the tools.",
                "response_format",
                "unsupported",
            )

    @property
    def constrained(self) -> bool:
        """Whether the answer has to have a certain form."""
        return self.grammar is not None or self.response_format not in (None, ResponseFormat(type="text"))

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return for_template(self.messages)

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template; ``None`` if the model is to call none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def options(self, context: int) -> dict[str, Any]:
        """Return the options of :meth:`edge_spec.Engine.stream`.

        Args:
            context: most tokens of prompt and answer, which are the limit where the request has none.
        """
        options = self.common_options()
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        options["max_new_tokens"] = min([*limits, context])
        options["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.offered_tools() and self.parallel_tool_calls is False:
            stops = [options["stop"]] if isinstance(options["stop"], str) else options["stop"]
            options["stop"] = [*stops, _TOOL_CALL_END]
        wanted = self.response_format
        schema = None
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise ApiError(
                    400,
                    "response_format is of type json_schema, but response_format.json_schema.schema is missing.",
                    "response_format",
                    "invalid_value",
                )
            schema = wanted.json_schema.schema_
        grammar = grammar_of(self.grammar, schema, wanted is not None and wanted.type == "json_object")
        return options if grammar is None else {**options, "grammar": grammar}
