"""Requests made up from the server's own description never make it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import edge_spec
from running_server import serving
from tiny_models import CHAT_TEMPLATE

schemathesis = pytest.importorskip("schemathesis", reason="THE SERVER IS NOT FUZZED: schemathesis is not installed")


@pytest.fixture(scope="module")
def url(tiny_bundle: Callable[..., Path]) -> Iterator[str]:
    template = "{{ tools }}" + CHAT_TEMPLATE
    with (
        edge_spec.load(tiny_bundle(chat_template=template)) as engine,
        serving(engine, max_request_bytes=1 << 16) as it,
    ):
        yield it.url


OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /ready",
    "GET /status",
    "GET /metrics",
]


def operations(url: str) -> dict[str, Any]:
    described = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [operation.ok() for operation in described.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def test_all_that_is_described_is_fuzzed(url: str) -> None:
    assert sorted(operations(url)) == sorted(OPERATIONS)


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_makes_the_server_fail(url: str, name: str, mode: Any) -> None:
    operation = operations(url)[name]

    @hypothesis.settings(
        max_examples=40 if name.startswith("POST") else 8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=url, timeout=120)
        assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())
        if response.status_code >= 400 and response.request.method != "HEAD":
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        if "text/event-stream" in response.headers.get("content-type", ""):
            assert '"internal_error"' not in response.text

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:  # what takes no arguments has no wrong ones
        assert mode == schemathesis.GenerationMode.NEGATIVE and "completions" not in name
