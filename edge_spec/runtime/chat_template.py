"""A model's chat template: from messages to the prompt the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.runtime.template_limits import (
    COMPILE_SECONDS,
    LARGEST_SOURCE,
    RENDER_SECONDS,
    LimitReachedError,
    limited,
)
from edge_spec.runtime.template_sandbox import sandbox, undeclared_names

_LONGEST_REASON = 500


class ChatTemplate:
    """A Jinja chat template, rendered in a sandbox.

    Templates come with the weights, from strangers: they see the messages and the special tokens, can change
    neither, cannot reach Python's internals, and are stopped when they take too much time or memory
    (:mod:`edge_spec.runtime.template_limits`). The environment is the one templates are written for, that of
    transformers' ``apply_chat_template``.

    Args:
        source: the template.
        special_tokens: variables such as ``bos_token`` and ``eos_token``.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
        RequestError: the template has a syntax error, or is beyond a limit.

    Attributes:
        takes_tools: whether it knows of ``tools``; otherwise it would leave them out without a word.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = sandbox()
        try:
            if len(source) > LARGEST_SOURCE:
                raise LimitReachedError(f"it has {len(source):,} characters, expected at most {LARGEST_SOURCE:,}")
            template = limited(COMPILE_SECONDS, lambda: environment.from_string(source))
            self._render: Callable[..., str] = template.render
            self.takes_tools = "tools" in limited(COMPILE_SECONDS, lambda: undeclared_names(environment, source))
        except (Exception, LimitReachedError) as error:
            raise RequestError(
                f"the chat template cannot be read ({_reason(error)}); give the prompt as text instead, "
                "or repair chat_template.jinja and export again"
            ) from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation. It holds its special tokens: encode it without adding any.

        Args:
            messages: each with a ``role`` and, unless it only calls tools, a ``content`` (text, or a list of parts).
            add_generation_prompt: end with what introduces the assistant's answer.
            variables: further variables of the template, such as ``tools``.

        Raises:
            RequestError: the messages are malformed, or the template refuses them, fails or is beyond a limit.
        """
        conversation = checked_messages(messages)
        defaults = {"tools": None, "documents": None, **self._special_tokens}
        try:
            names = {**defaults, **variables, "messages": conversation, "add_generation_prompt": add_generation_prompt}
            return limited(RENDER_SECONDS, lambda: self._render(**names))
        except (Exception, LimitReachedError) as error:  # a template can fail in any way Python can
            raise RequestError(
                f"the chat template cannot render these messages ({_reason(error)}); "
                "change the messages to what this model's template expects, or give the prompt as text"
            ) from error


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the messages of a conversation. Raises RequestError if they are malformed."""
    example = '[{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}, expected a list such as {example}")
    if not messages:
        raise RequestError(f"messages is empty, expected at least one message, such as {example}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} is a {type(message).__name__}, expected a mapping as in {example}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"message {index} has the role {role!r}, expected a name such as 'user'")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"message {index} ({role}) has no content, expected a text")
        if not isinstance(content, str | list | tuple | None):
            raise RequestError(
                f"the content of message {index} ({role}) is a {type(content).__name__}, "
                "expected a text or a list of parts"
            )
    return [dict(message) for message in messages]


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = str(error) or type(error).__name__
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
    return f"line {line}: {text}" if line else text
