"""Tools reach the chat template, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edge_spec
from edge_spec.errors import PromptTooLongError, RequestError

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
)
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def test_tools_are_in_the_prompt_and_its_ids_stand_for_it(tiny_bundle: Callable[..., Path]) -> None:
    with edge_spec.load(tiny_bundle(chat_template=TEMPLATE)) as engine:
        plain, with_tools = engine.encode(USER), engine.encode(USER, tools=TOOLS)
        text = b"".join(map(engine.token_bytes, with_tools)).decode()
        assert '"name": "look_up"' in text and text.endswith("user:Hi\n")
        assert engine.encode(USER, tools=[]) == plain
        assert engine.generate(plain, max_new_tokens=8).token_ids == engine.chat(USER, max_new_tokens=8).token_ids


def test_tools_that_nobody_would_read_are_refused(tiny_bundle: Callable[..., Path]) -> None:
    with edge_spec.load(tiny_bundle(chat_template="{{ messages[0].content }}")) as engine:
        with pytest.raises(RequestError, match="takes no tools"):
            engine.encode(USER, tools=TOOLS)
        with pytest.raises(RequestError, match="give chat messages"):
            engine.encode("a text", tools=TOOLS)


def test_a_prompt_that_fills_the_context_has_an_error_of_its_own(tiny_bundle: Callable[..., Path]) -> None:
    with edge_spec.load(tiny_bundle(), context=32) as engine, pytest.raises(PromptTooLongError, match="leaves no room"):
        engine.encode("x" * 32)
