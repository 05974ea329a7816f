"""Who may come in: by key, by the name the server is called by, by size and kind of what they bring."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_spec
from edge_spec import Engine
from edge_spec.errors import RequestError
from edge_spec.serve.settings import ServeSettings
from running_server import HELLO, Running, serving
from tiny_models import CHAT_TEMPLATE

KEY, OTHER = "correct-horse", "battery-staple"
PATHS = ["/v1/models", "/status", "/metrics", "/openapi.json", "/nowhere"]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with edge_spec.load(tiny_bundle(chat_template=CHAT_TEMPLATE)) as engine:
        yield engine


@pytest.fixture(scope="module")
def locked(engine: Engine) -> Iterator[Running]:
    with serving(
        engine, api_keys=(KEY, OTHER), allowed_hosts=("nas.local",), cors_origins=("https://a.example",)
    ) as it:
        yield it


@pytest.fixture(scope="module")
def open_(engine: Engine) -> Iterator[Running]:
    with serving(engine, max_request_bytes=4096) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_nothing_is_told(locked: Running, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(KEY[:-1]), {"Authorization": KEY}, {"Authorization": "ö"}):
        response = locked.client.get(path, headers={name: value.encode("latin-1") for name, value in headers.items()})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for key in (KEY, OTHER):
        assert locked.client.get(path, headers=bearer(key)).status_code == (404 if path == "/nowhere" else 200)


def test_generating_needs_the_key(locked: Running) -> None:
    assert locked.chat().status_code == 401
    assert locked.client.post("/v1/chat/completions", json={"messages": HELLO}, headers=bearer(KEY)).status_code == 200


def test_health_and_the_page_need_no_key(locked: Running) -> None:
    for path in ("/health", "/ready", "/"):
        assert locked.client.get(path).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"])
def test_a_name_that_is_not_the_servers_is_refused(locked: Running, host: str) -> None:
    assert locked.client.get("/health", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:80", "10.0.0.7", "nas.local:8080"])
def test_its_names_and_plain_addresses_are_accepted(locked: Running, host: str) -> None:
    assert locked.client.get("/health", headers={"Host": host}).status_code == 200


def test_pages_from_elsewhere_are_let_in_by_name_only(locked: Running, open_: Running) -> None:
    def preflight(server: Running, origin: str) -> Any:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return server.client.options("/v1/chat/completions", headers=headers).headers.get("access-control-allow-origin")

    assert preflight(locked, "https://a.example") == "https://a.example"
    assert preflight(locked, "https://b.example") is None
    assert preflight(open_, "https://a.example") is None


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", ""])
def test_a_page_from_elsewhere_generates_nothing(open_: Running, origin: str) -> None:
    answer = open_.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_the_servers_own_page_and_named_ones_generate(locked: Running, open_: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 1}
    own = {"Origin": str(open_.client.base_url).rstrip("/")}
    assert open_.client.post("/v1/completions", json=body, headers=own).status_code == 200
    named = {"Origin": "https://a.example", **bearer(KEY)}
    assert locked.client.post("/v1/completions", json=body, headers=named).status_code == 200


def test_a_body_that_is_not_declared_as_json_is_refused(open_: Running) -> None:
    body = json.dumps({"messages": HELLO})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = open_.client.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code == 415


def test_a_body_beyond_the_limit_is_refused_however_it_comes(open_: Running) -> None:
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode()
    headers = {"Content-Type": "application/json"}
    whole = open_.client.post("/v1/chat/completions", content=large, headers=headers)
    chunked = open_.client.post(
        "/v1/chat/completions", content=(large[i : i + 99] for i in range(0, 5099, 99)), headers=headers
    )
    for response in (whole, chunked):
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
    assert open_.chat().status_code == 200


def test_a_body_without_end_is_not_read_for_ever(open_: Running) -> None:
    """Sent over a plain socket, since a client would stop at the answer."""
    host, port = open_.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        try:
            while sent < 1 << 26:
                connection.sendall(b"1000\r\n" + bytes(0x1000) + b"\r\n")
                sent += 0x1000
        except OSError:
            pass
        assert sent < 1 << 26


DEEP = "[" * 50_000 + "]" * 50_000
MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"messages": "hello"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "king", "content": "x"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 3000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "1"}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"\xd9\xa3": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"3": 1e300}}',
    b'{"messages": [{"role": "user", "content": "x"}], "grammar": {}}',
    b'{"messages": [{"role": "user", "content": "x"}], "grammar": {"regex": "a", "lark": "b"}}',
    b'{"messages": [{"role": "user", "content": "x"}], '
    b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_what_is_malformed_is_the_clients_fault(open_: Running, body: bytes) -> None:
    response = open_.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_nesting_without_end_is_the_clients_fault(engine: Engine) -> None:
    with serving(engine) as server:
        for place in ("metadata", "messages", "tools", "response_format"):
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{place}": {DEEP}}}'
            response = server.client.post(
                "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400


def test_paths_and_methods_that_are_not_there_are_told_in_the_same_shape(open_: Running) -> None:
    assert open_.client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    response = open_.client.get("/v1/chat/completions")
    assert response.status_code == 405 and response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "wrong",
    [{"api_keys": ("short",)}, {"parallel": 0}, {"queue_limit": -1}, {"max_request_bytes": 1}, {"model": "a b"}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ServeSettings(**{"model": "tiny", **wrong})
