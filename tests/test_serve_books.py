"""What a server says of itself: status, metrics, logs and records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import edge_spec
from edge_spec import Engine
from edge_spec.prompt_record import PromptRecorder
from edge_spec.serve.json_log import JsonFormatter
from running_server import HELLO, MODEL, Running, serving, wait_until
from tiny_models import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(chat_template=CHAT_TEMPLATE)) as engine:
        yield engine


def metrics(server: Running) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {
        (sample.name.removeprefix("edge_spec_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_was_generated(engine: Engine) -> None:
    with serving(engine) as server:
        whole = server.chat(max_tokens=20, temperature=0).json()["edge_spec"]["statistics"]
        server.chat(max_tokens=20, temperature=0, stream=True)
        server.refusal(temperature=7)
        server.client.get("/some/path")
        counted = metrics(server)
        assert counted["requests_total", "/v1/chat/completions", "200"] == 2
        assert counted["requests_total", "/v1/chat/completions", "400"] == 1
        assert counted["requests_total", "other", "404"] == 1
        generated = {key[1]: value for key, value in counted.items() if key[0] == "generated_tokens_total"}
        assert sum(generated.values()) == 2 * whole["new_tokens"]
        rounds = counted["rounds_total", "plain"] + counted["rounds_total", "drafted"]
        assert 2 <= rounds <= 2 * whole["new_tokens"]
        assert counted["time_to_first_token_seconds_count",] == 2
        assert counted["mean_accepted_length_count",] == 2
        assert counted["requests_running",] == counted["requests_waiting",] == 0
        assert counted["memory_bytes", "planned"] == engine.plan.total_bytes
        assert counted["memory_bytes", "resident"] > 0


def test_status_describes_model_memory_queue_and_work(engine: Engine) -> None:
    with serving(engine, queue_limit=7) as server:
        server.chat()
        status = server.client.get("/status").json()
    assert status["model"] == MODEL and status["exactness"] == engine.exactness
    assert status["drafters"] == list(engine.drafters) and status["context"] == engine.context
    assert sum(part["bytes"] for part in status["plan"]["parts"]) == status["plan"]["total_bytes"]
    assert status["memory"].keys() == {"resident_bytes", "planned_bytes"}
    assert status["queue"] == {"running": 0, "waiting": 0, "limit": 7}


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_holds_prompts_only_where_it_is_told_to(
    engine: Engine, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    with serving(engine, log_prompts=log_prompts) as server, caplog.at_level(logging.INFO):
        messages = [{"role": "user", "content": "my secret"}]
        text = server.chat(messages=messages).json()["choices"][0]["message"]["content"]
        server.refusal(messages=messages, temperature=9)
        server.client.get("/health")
        wait_until(lambda: len([1 for record in caplog.records if record.message == "request"]) == 2)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.message == "request"]
    answered, refused = lines
    assert answered["status"] == 200 and answered["new_tokens"] > 0 and answered["client"] == "127.0.0.1"
    assert {"seconds", "ttft_seconds", "waiting_seconds", "prompt_tokens", "finish_reason"} <= answered.keys()
    assert refused["status"] == 400 and refused["error"] == "invalid_value"
    assert ("my secret" in json.dumps(lines)) == log_prompts
    assert ("texts" in answered) == log_prompts
    if log_prompts:
        assert answered["texts"] == [text]


def test_log_lines_are_json_with_the_traceback() -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("edge_spec.test")
    logger.addHandler(handler)
    try:
        raise ValueError("broken\nline")
    except ValueError:
        logger.exception("it %s", "failed", extra={"fields": {"id": "7"}})
    finally:
        logger.removeHandler(handler)
    (line,) = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert parsed["message"] == "it failed" and parsed["id"] == "7" and "ValueError" in parsed["traceback"]


def test_prompts_are_recorded_where_it_is_told_to(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    with serving(engine, recorder=PromptRecorder(file)) as server:
        server.chat(temperature=0.5, seed=3)
        server.client.post("/v1/completions", json={"prompt": "once", "max_tokens": 2})
        server.refusal(temperature=9)
    chat, completion = (json.loads(line) for line in file.read_text().splitlines())
    assert chat["messages"] == HELLO and chat["options"]["temperature"] == 0.5 and chat["options"]["seed"] == 3
    assert completion["prompt"] == "once" and completion["options"]["max_new_tokens"] == 2


def test_the_page_is_there_and_may_load_nothing_from_elsewhere(engine: Engine) -> None:
    with serving(engine) as server:
        page = server.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<html" in page.text.lower()


def test_requests_have_names_for_the_log(engine: Engine) -> None:
    with serving(engine) as server:
        names = {server.client.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(names) == 3
