"""A model's chat template: from messages to the prompt the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from edge_spec.errors import MissingDependencyError, RequestError


class ChatTemplate:
    """A Jinja chat template, rendered in a sandbox.

    Templates come with the weights, from strangers: they see the messages and the special tokens, can change
    neither, and cannot reach Python's internals. The environment is the one templates are written for, that of
    transformers' ``apply_chat_template``.

    Args:
        source: the template.
        special_tokens: variables such as ``bos_token`` and ``eos_token``.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
        RequestError: the template has a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = _sandbox()
        try:
            self._render: Callable[..., str] = environment.from_string(source).render
        except Exception as error:
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
            RequestError: the messages are malformed, or the template refuses them or fails.
        """
        conversation = checked_messages(messages)
        defaults = {"tools": None, "documents": None, **self._special_tokens}
        try:
            return self._render(
                **{**defaults, **variables, "messages": conversation, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # a template can fail in any way Python can
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


def _sandbox() -> Any:
    """The Jinja environment of chat templates. Jinja2 is only needed by those who chat, so it is imported here."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.runtime import Undefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError(
            "a chat template needs Jinja2, which is not installed; pip install jinja2, or give the prompt as text"
        ) from error

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
            # Jinja's own answer is an undefined value, which prints as nothing: an attempt would go unnoticed.
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is not allowed")

    class GenerationBlock(Extension):
        """``{% generation %}``: marks the assistant's tokens for training, and means nothing when prompting."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an attribute of instances

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML, which would put \u003c into prompts.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    text = str(error) or type(error).__name__
    return f"line {line}: {text}" if line else text
