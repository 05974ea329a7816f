"""A chat template cannot take more time or memory than a prompt needs, and honest ones notice nothing of the limits."""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

import pytest

from edge_spec.errors import RequestError
from edge_spec.runtime import chat_template, template_limits
from edge_spec.runtime.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
DOUBLING = "{% set ns = namespace(x=messages) %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"

BOMBS = {
    "text times number": "{{ 'a' * 10**9 }}",
    "number times text": "{{ 10**9 * 'a' }}",
    "list times number": "{{ ([1] * 10**9) | length }}",
    "huge power": "{{ 9 ** (9 ** 9) }}",
    "growing power": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%0999999999d' % 5 }}",
    "percent star": "{{ '%*d' % (999999999, 5) }}",
    "percent precision": "{{ '%.999999999f' % 5 }}",
    "format width": "{{ '{:999999999}'.format(5) }}",
    "format nested width": "{{ '{:{}}'.format(5, 999999999) }}",
    "format_map width": "{{ '{a:>999999999}'.format_map({'a': 5}) }}",
    "format filter": "{{ '%0999999999d' | format(5) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "indent filter": "{{ ('\n' * 100000) | indent(100000) }}",
    "indent by lines": "{{ ('\n' * 1000000) | indent(10000) }}",
    "batch filter": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice filter": "{{ [1] | slice(10**9) | list }}",
    "round filter": "{{ 5 | round(10**9) }}",
    "join filter": "{{ range(100000) | join('a' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('', 'b' * 100000) }}",
    "wordwrap filter": "{{ ('a' * 100000) | wordwrap(1, true, 'b' * 10000) }}",
    "json indent": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(9999) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(range(100000) | map('string')) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "date": "{{ strftime_now('%0999999d' * 50) }}",
    "doubling with ~": DOUBLING.replace("BODY", "ns.x ~ ns.x"),
    "doubling with +": DOUBLING.replace("=messages", "='a'").replace("BODY", "ns.x + ns.x"),
    "doubling lists": DOUBLING.replace("BODY", "ns.x + ns.x"),
    "doubling by nesting": DOUBLING.replace("BODY", "[ns.x, ns.x]"),
    "doubling tuples": DOUBLING.replace("BODY", "(ns.x, ns.x)"),
    "doubling by dict": DOUBLING.replace("BODY", "{'a': ns.x, 'b': ns.x}"),
    "doubling by call": DOUBLING.replace("BODY", "dict(a=ns.x, b=ns.x)"),
    "doubling by join": DOUBLING.replace("=messages", "='aa'").replace("BODY", "[ns.x, ns.x] | join"),
    "doubling by capture": "{% set a = 'a' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "doubling by macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}a{% endif %}{% endmacro %}{{ f(60) }}",  # noqa: E501
    "depth": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",  # noqa: E501
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",  # noqa: E501
    "many large texts": "{% set x = 'a' * 4000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "keeping large texts": (
        "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = ns.x + ['a' * 4000000] %}{% endfor %}"
    ),
    "slices": "{% set x = 'a' * 4000000 %}{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = ns.x + [x[1:]] %}{% endfor %}",  # noqa: E501
    "splitting": "{% set ns = namespace(x=[]) %}{% for a in range(999) %}{% set ns.x = ns.x + [('ab ' * 1000000).split()] %}{% endfor %}",  # noqa: E501
    "searching": "{% for a in range(99999) %}{{ (('a' * 1000000) + 'b') | urlize | length }}{% endfor %}",
    "sorting": "{% for a in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "lazy maps": "{% for a in range(99999) %}{% set x = range(99999) | map('string') | map('upper') | last %}{% endfor %}",  # noqa: E501
    "lorem ipsum": "{{ lipsum(n=10**8) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_stopped_before_it_goes_off(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match="the chat template cannot (be read|render)"):
        ChatTemplate(source).render(USER)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 1 << 20


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 2 seconds"),
        ("{{ 'a' * 10**9 }}", "more than 4,194,304 characters"),
        ("{{ 'a' | center(10**9) }}", "number beyond 10,000"),
        ("{{ 9 ** (9 ** 9) }}", "more than 10,000 bits"),
        ("{% set x = 'a' * 4000000 %}{% for a in range(99) %}{{ x }}{% endfor %}", "more than 33,554,432 characters"),
        ("a" * 200_000, "expected at most 131,072"),
    ],
)
def test_the_limit_is_named(source: str, limit: str) -> None:
    with pytest.raises(RequestError, match=limit):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000,
        "{{ " + "-" * 50_000 + "1 }}",
        "{{ x" + "[0]" * 30_000 + " }}",
    ],
    ids=["parentheses", "blocks", "signs", "subscripts"],
)
def test_a_template_that_is_hard_to_compile_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "COMPILE_SECONDS", 0.5)
    with pytest.raises(RequestError, match="the chat template cannot"):
        ChatTemplate(source).render(USER)


def test_the_limit_holds_in_any_thread_and_for_each_rendering_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    template = ChatTemplate("{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"  # noqa: E501
                            "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}")  # fmt: skip
    results: dict[str, Any] = {}

    def render(content: str) -> None:
        try:
            results[content] = template.render([{"role": "user", "content": content}])
        except RequestError as error:
            results[content] = str(error)

    threads = [threading.Thread(target=render, args=(content,)) for content in ("loop", "Hi")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["Hi"] == "Hi" and "more than 0.2 seconds" in results["loop"]
    for _ in range(3):
        render("Hi")
        assert results["Hi"] == "Hi"


def test_what_traces_the_program_goes_on_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def tracer(*event: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        ChatTemplate("{{ messages[0].content }}").render(USER)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_waiting_is_not_working(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the clock runs on while the template does not.
    monkeypatch.setattr(template_limits.time, "thread_time", lambda: 0.0)
    assert template_limits.limited(0.001, lambda: time.sleep(0.01)) is None


def test_long_conversations_render() -> None:
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m.role] %}"
        "{% set text = m.content %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{{ '<' ~ m.role ~ '>' + text | trim + '\n' }}{% endfor %}{{ ns.seen | length }}"
    )
    messages = [{"role": "user", "content": f"{index} " + "text " * 500} for index in range(400)]
    rendered = ChatTemplate(source).render(messages)
    assert rendered.startswith("<user>0 text") and rendered.endswith("\n400") and len(rendered) > 900_000


def test_text_is_built_as_jinja_builds_it() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}|{{ [1, 2] + [3] }}|{{ 'ab' * 2 }}|{{ '%s-%03d' % ('x', 7) }}|{{ 7 % 4 }}|"
        "{{ '{:>4}{}'.format('a', 1) }}|{{ 2 ** 10 }}|{{ (1, 2) }}|{{ {'a': [1]} }}|{{ 'a,b'.split(',') | join('+') }}|"
        "{{ 'x\ny' | indent(2) }}|{{ 'abc' | replace('b', 'xyz') }}|{{ [3, 1] | sort | first }}|{{ 'ab' | center(6) }}|"
        "{{ [1, 2, 3] | batch(2, 0) | list }}|{{ 2.345 | round(1) }}|{{ messages[-1:] | length }}|{{ 'a'.zfill(3) }}"
    )
    expected = (
        "a1None[1, 'b']|[1, 2, 3]|abab|x-007|3|   a1|1024|(1, 2)|{'a': [1]}|a+b|x\n  y|axyzc|1|  ab  |"
        "[[1, 2], [3, 0]]|2.3|1|00a"
    )
    assert ChatTemplate(source).render(USER) == expected


TOOLS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {{- "Tools: " + tools | selectattr('type', 'equalto', 'function') | map(attribute='function.name') | join(", ") }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- tool_call.name + "(" }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' ~ arg_val ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ")<|eom_id|>" }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""


def test_templates_with_tools_render_as_without_limits() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # what templates are written for

    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Bergen", "days": 3}}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Rain?\n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": "Yes."},
    ]
    for tools in (None, [{"type": "function", "function": function}]):
        names = {"messages": messages, "tools": tools, "add_generation_prompt": True, "bos_token": "<s>"}
        expected = _compile_jinja_template(TOOLS).render(documents=None, **names)
        assert ChatTemplate(TOOLS, {"bos_token": "<s>"}).render(messages, tools=tools) == expected
        assert "Bergen" in expected
