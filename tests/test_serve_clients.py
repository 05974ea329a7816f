"""Other clients than the official one for Python: that for JavaScript, and LangChain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_spec
from edge_spec import Engine
from running_server import HELLO, MODEL, Running, scripted, serving
from tiny_models import CHAT_TEMPLATE

_PACKAGE = "openai@>=4"
SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "anything", maxRetries: 0 });
const asked = { model: "tiny", messages: [{ role: "user", content: "hello" }], max_tokens: 24, seed: 7 };
const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 1 });
let streamed = "", finish = null, usage = null;
const stream = await client.chat.completions.create(
  { ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
const text = whole.choices[0].message.content;
const stop = text.slice(3, 5);
const stopped = await client.chat.completions.create({ ...asked, stop });
const properties = { yes: { type: "boolean" } };
const schema = { type: "object", properties, required: ["yes"], additionalProperties: false };
const object = await client.chat.completions.create({
  ...asked,
  max_tokens: 100,
  response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
});
const errors = {};
for (const [name, wrong] of Object.entries({ temperature: 9, model: "other" })) {
  try {
    await client.chat.completions.create({ ...asked, [name]: wrong });
  } catch (error) {
    errors[name] = [error.constructor.name, error.status, error.param];
  }
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
// Whoever breaks off hangs up.
const left = await client.chat.completions.create({ ...asked, max_tokens: 200, stream: true });
for await (const chunk of left) { left.controller.abort(); break; }
console.log(JSON.stringify({
  text, streamed, finish, usage, stopped: stopped.choices[0].message.content, stop, errors, models,
  logprobs: whole.choices[0].logprobs.content.length, object: JSON.parse(object.choices[0].message.content) }));
"""


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(chat_template="{{ tools }}" + CHAT_TEMPLATE)) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine) as server:
        yield server


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """A folder in the cache with the npm client."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("THE CLIENT FOR JAVASCRIPT IS NOT TESTED: there is no npm")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "edge-spec" / "test-npm"
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", _PACKAGE]
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if installed.returncode:
            pytest.skip(f"THE CLIENT FOR JAVASCRIPT IS NOT TESTED: npm fails: {installed.stderr[-500:]}")
    return folder


def test_the_client_for_javascript_gets_what_it_asks_for(server: Running, engine: Engine, node_folder: Path) -> None:
    script = node_folder / f"ask-{os.getpid()}.mjs"
    script.write_text(SCRIPT)
    try:
        command = ["node", script.name, f"{server.url}/v1"]
        ran = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, timeout=120)
    finally:
        script.unlink()
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    expected = engine.generate(engine.encode(HELLO), max_new_tokens=24, seed=7, temperature=1.0)
    assert said["text"] == said["streamed"] == expected.text
    assert said["finish"] == "length" and said["usage"]["completion_tokens"] == said["logprobs"] == 24
    assert said["stopped"] == expected.text[: expected.text.index(said["stop"])]
    assert isinstance(said["object"]["yes"], bool)
    assert said["errors"] == {
        "temperature": ["BadRequestError", 400, "temperature"],
        "model": ["NotFoundError", 404, "model"],
    }
    assert said["models"] == [MODEL]


@pytest.fixture
def langchain(server: Running) -> Any:
    package = pytest.importorskip("langchain_openai", reason="LANGCHAIN IS NOT TESTED: it is not installed")
    return package.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="anything",
        model=MODEL,
        seed=7,
        max_tokens=24,
        temperature=1.0,
        max_retries=0,
    )


def test_langchain_asks_and_streams(langchain: Any, engine: Engine) -> None:
    expected = engine.generate(engine.encode(HELLO), max_new_tokens=24, seed=7, temperature=1.0)
    answer = langchain.invoke("hello")
    assert answer.content == expected.text
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join(chunk.content for chunk in langchain.stream("hello")) == expected.text


def test_langchain_gets_structured_answers(langchain: Any) -> None:
    schema = {
        "title": "answer",
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    answer = langchain.with_structured_output(schema, method="json_schema").invoke("hello")
    assert isinstance(answer["yes"], bool)


def test_langchain_calls_tools(tiny_bundle: Callable[..., Path]) -> None:
    package = pytest.importorskip("langchain_openai", reason="LANGCHAIN IS NOT TESTED: it is not installed")

    def weather(city: str) -> str:
        """Tell the weather."""
        return city

    # Tools as JSON are long in tokens of a byte each.
    with edge_spec.load(tiny_bundle(chat_template="{{ tools[0].function.name }}" + CHAT_TEMPLATE)) as engine:
        scripted(engine, ['<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'])
        with serving(engine) as server:
            chat = package.ChatOpenAI(base_url=f"{server.url}/v1", api_key="anything", model=MODEL, max_retries=0)
            (call,) = chat.bind_tools([weather]).invoke("hello").tool_calls
    assert call["name"] == "weather" and call["args"] == {"city": "Köln"}
