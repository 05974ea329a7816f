"""What ``/v1/completions`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from edge_spec.serve.api_error import ApiError
from edge_spec.serve.generation_fields import MOST_CHOICES, GenerationFields
from edge_spec.serve.grammar_choice import grammar_of

# What OpenAI's API takes where a request does not say.
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields):
    """What ``/v1/completions`` takes."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0, lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=20)

    suffix: Any = None
    echo: Any = None
    best_of: Any = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "echo": (False,), "best_of": (1,)}

    def require_supported(self, model: str) -> None:
        """As for every completion; there may be so many answers in all."""
        super().require_supported(model)
        if len(self.prompts()) * self.choices > MOST_CHOICES:
            raise ApiError(
                400, f"At most {MOST_CHOICES} answers can be had at once; ask more than once.", "prompt", "unsupported"
            )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts; there may be several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items: list[Any] = [*self.prompt]
        return [items] if not items or isinstance(items[0], int) else items

    def options(self, context: int) -> dict[str, Any]:
        """Return the options of :meth:`edge_spec.Engine.stream`.

        Args:
            context: most tokens of prompt and answer.
        """
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        options = {**self.common_options(), "max_new_tokens": min(limit, context), "logprobs": self.logprobs}
        grammar = grammar_of(self.grammar, None, False)
        return options if grammar is None else {**options, "grammar": grammar}
