"""Chat templates render as their authors expect, and cannot do anything else."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from edge_spec.errors import MissingDependencyError, RequestError
from edge_spec.runtime.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def test_chatml_with_and_without_an_opening_for_the_answer() -> None:
    template = ChatTemplate(CHATML)
    conversation = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(USER) == conversation + "<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == conversation


def test_blocks_take_their_line_with_them() -> None:
    source = "start\n  {% if true %}\n  inside\n  {% endif %}\nend\n"
    assert ChatTemplate(source).render(USER) == "start\n  inside\nend"


def test_special_tokens_and_variables_are_visible_and_variables_win() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}|{{ mode }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(USER, mode="x", eos_token="<end>") == "<s>|<end>|x"


def test_tools_and_documents_are_none_unless_given() -> None:
    template = ChatTemplate("{% if tools is not none %}{{ tools | length }}{% else %}none{% endif %}")
    assert template.render(USER) == "none"
    assert template.render(USER, tools=[{"name": "f"}]) == "1"


def test_json_is_not_escaped_for_html_and_keeps_its_order() -> None:
    value = {"z": "<é> & 'x'", "a": [1, None, True]}
    assert ChatTemplate("{{ value | tojson }}").render(USER, value=value) == (
        '{"z": "<é> & \'x\'", "a": [1, null, true]}'
    )
    assert ChatTemplate("{{ value | tojson(indent=2, sort_keys=true) }}").render(USER, value={"b": 1, "a": 2}) == (
        '{\n  "a": 2,\n  "b": 1\n}'
    )


def test_loop_controls_generation_blocks_and_dates_work() -> None:
    source = """
{%- for n in [1, 2, 3, 4] %}{% if n == 2 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}{{ n }}
{%- endfor %}{% generation %}!{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%%') }}"""
    assert ChatTemplate(source).render(USER) == "13!Hi%"


def test_a_template_that_refuses_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="cannot render these messages .*roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ self.__init__ }}",
        "{{ (messages | map(attribute='__class__') | list) }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_cannot_reach_into_python(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template cannot render"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.append(1) }}",
        "{{ extra.clear() }}",
    ],
)
def test_a_template_cannot_change_what_it_is_given(source: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    extra = {"a": 1}
    with pytest.raises(RequestError):
        ChatTemplate(source).render(messages, extra=extra)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert extra == {"a": 1}


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'open", "{% for x in y %}", "{% unknown %}", "{{ x | nofilter }}"])
def test_a_template_with_a_syntax_error_is_refused_with_its_line(source: str) -> None:
    with pytest.raises(RequestError, match=r"the chat template cannot be read \(line 2: "):
        ChatTemplate("first line\n" + source)


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[5].content.x }}", "{{ 'a' + 1 }}", "{% include 'x' %}"])
def test_a_template_that_fails_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template cannot render"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages is a str, expected a list"),
        ({"role": "user", "content": "Hi"}, "messages is a dict, expected a list"),
        (None, "messages is a NoneType, expected a list"),
        ([], "messages is empty"),
        (["Hi"], "message 0 is a str, expected a mapping"),
        ([*USER, {"content": "Hi"}], "message 1 has the role None"),
        ([{"role": 3, "content": "Hi"}], "message 0 has the role 3"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": 5}], r"content of message 0 \(user\) is a int"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(CHATML).render(messages)


def test_a_message_that_only_calls_tools_needs_no_content() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls[0].name }};{% endfor %}")
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    assert template.render([*USER, calls]) == "user:Hi;assistant:search;"


def test_missing_jinja_is_named_only_when_a_template_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match="pip install jinja2"):
        ChatTemplate(CHATML)
