"""Requests made up from the server's own description never make it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from running_server import serving
from tiny_models import CHAT_TEMPLATE

import edge_spec

schemathesis = pytest.importorskip("schemathesis", reason="THE SERVER IS NOT FUZZED: schemathesis is not installed")

_SERVER: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def server(tiny_bundle: Callable[..., Path]) -> Iterator[None]:
    template = "{{ tools }}" + CHAT_TEMPLATE
    with edge_spec.load(tiny_bundle(chat_template=template)) as engine, serving(engine, max_request_bytes=1 << 16) as it:
        _SERVER["url"] = it.url
        yield


@pytest.fixture
def described() -> Any:
    return schemathesis.openapi.from_url(f"{_SERVER['url']}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@hypothesis.settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_makes_the_server_fail(case: Any) -> None:
    response = case.call(timeout=120)
    assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    if "text/event-stream" in response.headers.get("content-type", ""):
        assert '"internal_error"' not in response.text
