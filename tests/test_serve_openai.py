"""The official Python client gets from the server what it gets from OpenAI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import edge_spec
from edge_spec import Engine
from running_server import HELLO, MODEL, Running, scripted, serving
from tiny_models import CHAT_TEMPLATE

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}|"
    "{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(chat_template=CHAT_TEMPLATE)) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def test_a_grammar_that_takes_too_much_is_the_fault_of_its_client(client: openai.OpenAI) -> None:
    many = "start: " + " | ".join(f'"{number}"' for number in range(400))
    endless = "start: r0\n" + "\n".join(f"r{level}: r{level + 1} r{level + 1}" for level in range(60)) + '\nr60: "a"'
    for text in (many, endless):
        with pytest.raises(openai.BadRequestError, match="it takes too much"):
            ask(client, extra_body={"grammar": {"lark": text}})


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 7, **fields})


def test_an_answer_is_that_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine.chat(HELLO, max_new_tokens=24, seed=7, temperature=1.0)
    answer = ask(client)
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(engine.encode(HELLO))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.edge_spec["finish_reason"] == "length"
    assert answer.edge_spec["statistics"]["seed"] == 7


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client).choices[0].message.content
    *_, end, usage = chunks
    assert [end.choices[0].finish_reason, end.edge_spec["finish_reason"]] == ["length", "length"]
    assert usage.choices == [] and usage.usage.completion_tokens == 24
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])


def test_tokens_of_a_stream_say_who_proposed_them(client: openai.OpenAI) -> None:
    asked = {"stream": True, "temperature": 0, "extra_body": {"token_details": True, "speculation": "suffix"}}
    chunks = list(ask(client, **asked))
    tokens = [token for chunk in chunks for token in (getattr(chunk, "edge_spec", None) or {}).get("tokens", [])]
    assert len(tokens) == 24 and {"id", "text", "drafter"} == tokens[0].keys()
    for chunk in chunks:
        told = (getattr(chunk, "edge_spec", None) or {}).get("tokens")
        if told is not None:
            assert "".join(token["text"] for token in told) == chunk.choices[0].delta.content
    assert {token["drafter"] for token in tokens} <= {"target", "suffix", "ngram", "deferred"}


def test_answers_have_consecutive_seeds(client: openai.OpenAI) -> None:
    texts = [choice.message.content for choice in ask(client, n=3).choices]
    assert texts == [ask(client, seed=7 + index).choices[0].message.content for index in range(3)]
    streamed = ["", "", ""]
    for chunk in ask(client, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_text_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    stop = text[3:5]
    answer = ask(client, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine.chat(HELLO, max_new_tokens=24, seed=7, temperature=1.0, logprobs=2).logprobs
    assert expected is not None
    content = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [entry.logprob for entry in expected]
    assert [bytes(entry.bytes) for entry in content] == [engine.token_bytes(entry.token_id) for entry in expected]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
        [logprob for _, logprob in entry.top] for entry in expected
    ]
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_biases_and_penalties_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    options = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.9}
    expected = engine.chat(HELLO, max_new_tokens=24, seed=7, temperature=0.8, logit_bias={70: 100.0}, **options)
    answer = ask(client, temperature=0.8, logit_bias={"70": 100}, **options)
    assert answer.choices[0].message.content == expected.text


def test_an_answer_obeys_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["yes", "kind"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = ask(client, response_format=wanted, max_tokens=100)
    parsed = json.loads(answer.choices[0].message.content)
    assert parsed["kind"] in "ab" and isinstance(parsed["yes"], bool) and len(parsed) == 2
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_is_a_json_object(client: openai.OpenAI) -> None:
    bias = {str(ord("}") - 33): 100}  # ends it soon
    text = (
        ask(client, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=200).choices[0].message.content
    )
    assert text.startswith("{")


def test_an_answer_matches_a_regular_expression(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"grammar": {"regex": "[0-9]{4}"}})
    assert len(answer.choices[0].message.content) == 4 and answer.choices[0].message.content.isdigit()


@pytest.fixture
def calls_tools(tiny_bundle: Callable[..., Path]) -> Iterator[Callable[..., openai.OpenAI]]:
    """A client of a server whose model says what it is told."""
    with edge_spec.load(tiny_bundle(chat_template=TOOL_TEMPLATE)) as engine, serving(engine) as server:

        def saying(*pieces: str) -> openai.OpenAI:
            scripted(engine, pieces)
            return openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0)

        yield saying


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_a_model_calls_tools(calls_tools: Callable[..., openai.OpenAI]) -> None:
    client = calls_tools("Let me see.\n<tool", CALL[5:30], CALL[30:], "\n", CALL)
    (choice,) = ask(client, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_streamed_tool_calls_come_whole_and_numbered(calls_tools: Callable[..., openai.OpenAI]) -> None:
    client = calls_tools("Let me see.\n<tool", CALL[5:30], CALL[30:], "\n", CALL)
    chunks = list(ask(client, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert all(json.loads(call.function.arguments) == {"city": "Köln"} and call.id for call in calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_what_looks_like_a_call_is_text(calls_tools: Callable[..., openai.OpenAI]) -> None:
    (choice,) = ask(calls_tools(CALL)).choices
    assert choice.message.content == CALL and choice.message.tool_calls is None and choice.finish_reason == "stop"
    (choice,) = ask(calls_tools(CALL), tools=[WEATHER], tool_choice="none").choices
    assert choice.message.content == CALL


def test_a_conversation_with_tools_reads_on(tiny_bundle: Callable[..., Path]) -> None:
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    rendered = (
        "<system>Be brief.|<user>How is the weather?|"
        '<assistant>{"name": "weather", "arguments": {"city": "Köln"}}|<tool>Rain.|'
    )
    with edge_spec.load(tiny_bundle(chat_template=TOOL_TEMPLATE)) as engine, serving(engine) as server:
        tokens = server.chat(messages=conversation).json()["usage"]["prompt_tokens"]
        assert tokens == len(engine.encode(rendered))


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, openai.BadRequestError, "messages"),
        ({"extra_body": {"speculation": "nobody"}}, openai.BadRequestError, "speculation"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
        ({"logit_bias": {"100000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"tools": [WEATHER]}, openai.BadRequestError, "messages"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format"),
        ({"extra_body": {"grammar": {"regex": "("}}}, openai.BadRequestError, "grammar"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, openai.BadRequestError, "audio"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        ask(client, **fields, stream=stream)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_beyond_the_context_has_the_code_that_clients_look_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "x" * 500}])
    assert caught.value.code == "context_length_exceeded"


def test_what_changes_nothing_is_ignored(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "modalities": ["text"]}
    neutral = {"n": None, "stop": None, "tools": None, "logit_bias": None, "response_format": {"type": "text"}}
    assert ask(client, **fields, extra_body=neutral).choices[0].message.content == plain


def test_texts_are_continued_as_the_engine_does(client: openai.OpenAI, engine: Engine) -> None:
    expected = engine.generate("once upon", max_new_tokens=16, temperature=0.0, logprobs=1)
    answer = client.completions.create(model=MODEL, prompt="once upon", temperature=0, logprobs=1)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert choice.text == expected.text and choice.finish_reason == "length"
    assert expected.logprobs is not None
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in expected.logprobs]
    streamed = client.completions.create(model=MODEL, prompt="once upon", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text


def test_prompts_can_be_several_and_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    texts = ["once", "upon a time"]
    expected = [engine.generate(text, max_new_tokens=6).text for text in texts]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    answer = client.completions.create(prompt=texts, n=2, **asked)
    assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert answer.usage.prompt_tokens == sum(len(engine.encode(text)) for text in texts)
    ids = [engine.encode(text) for text in texts]
    assert [choice.text for choice in client.completions.create(prompt=ids, **asked).choices] == expected
    assert client.completions.create(prompt=ids[0], **asked).choices[0].text == expected[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"suffix": "end"}, "suffix"), ({"best_of": 3}, "best_of"), ({"echo": True}, "echo"), ({"prompt": ""}, "prompt")],
)
def test_what_no_text_can_have_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "once", **fields})
    assert caught.value.param == param


def test_the_model_is_listed_and_embeddings_are_refused(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "edge-spec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="text")


def test_the_asynchronous_client_asks_several_things_at_once(server: Running, client: openai.OpenAI) -> None:
    import asyncio

    async def answers() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="anything") as together:
            asked = [
                together.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, seed=seed)  # type: ignore[arg-type]
                for seed in range(8)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert asyncio.run(answers()) == [ask(client, seed=seed).choices[0].message.content for seed in range(8)]
