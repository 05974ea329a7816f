"""A server that answers as the HTTP interface of edge-spec does, with what a test tells it to say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import edge_spec.serve

PAGE = Path(edge_spec.serve.__file__).parent / "page.html"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GIB = 1 << 30


@dataclass
class Script:
    """What the server says.

    Attributes:
        rounds: the answer's tokens, as (text, drafter), by target call.
        acceptance: what it tells of acceptance by position.
        plain: the answer without speculation; the same text if ``None``.
        pause: seconds between rounds.
        holds: rounds after which the answer stops until ``go`` is set; ``None`` for none.
        go: lets a held answer continue.
        endless: say the rounds again and again, until nobody listens.
        breaks: end the connection after the first round.
        key: what has to be given, if anything.
        refusals: (status, headers, message) of the next requests that are not answered.
        requests: bodies of the requests that came.
        left: set once somebody stopped listening.
    """

    rounds: list[list[tuple[str, str]]] = field(default_factory=list)
    acceptance: tuple[float, ...] = (0.75, 0.5)
    plain: list[str] | None = None
    pause: float = 0.0
    holds: int | None = None
    go: threading.Event = field(default_factory=threading.Event)
    endless: bool = False
    breaks: bool = False
    key: str | None = None
    refusals: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def scripted_server(script: Script) -> Iterator[str]:
    """Serve on a free port of this machine; give the page's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        script.endless = False
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, PAGE.read_bytes(), {"Content-Type": "text/html; charset=utf-8"})
        elif self.path == "/status" and not self._locked():
            self._json(200, _status())
        else:
            self._error(401 if self.path == "/status" else 404, "no")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._locked():
            self._error(401, "An API key is needed.")
        elif self.script.refusals:
            status, headers, message = self.script.refusals.pop(0)
            self._error(status, message, headers)
        else:
            self.script.requests.append(request)
            try:
                self._stream(request)
            except OSError:
                self.script.left.set()

    def _stream(self, request: dict[str, Any]) -> None:
        script = self.script
        rounds = script.rounds
        if request["speculation"] == "off":
            texts = script.plain or [text for tokens in rounds for text, _ in tokens]
            rounds = [[(text, "target")] for text in texts]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        spoken = 0
        tokens = 0
        while True:
            for told in rounds:
                time.sleep(script.pause)
                if spoken == script.holds:
                    script.go.wait(30)
                described = [{"id": sum(text.encode()), "text": text, "drafter": drafter} for text, drafter in told]
                tokens += len(told)
                spoken += 1
                last = spoken == len(rounds) and not script.endless
                chunk = _chunk("".join(text for text, _ in told), described)
                if last:
                    chunk["edge_spec"] |= _ending(tokens, spoken, request["speculation"] != "off", script.acceptance)
                    chunk["choices"][0]["finish_reason"] = "stop"
                self._event(chunk)
                if script.breaks:
                    return
            if not script.endless:
                break
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        data = f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
        half = len(data) // 2  # an event, and a character of it, may come in two parts
        for part in (data[:half], data[half:]):
            self.wfile.write(part)
            self.wfile.flush()

    def _locked(self) -> bool:
        return self.script.key is not None and self.headers["Authorization"] != f"Bearer {self.script.key}"

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._json(status, {"error": error}, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Security-Policy": CONTENT_POLICY, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _chunk(text: str, described: list[dict[str, Any]]) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"object": "chat.completion.chunk", "choices": [choice], "edge_spec": {"tokens": described}}


def _ending(tokens: int, rounds: int, speculates: bool, acceptance: tuple[float, ...]) -> dict[str, Any]:
    statistics = {
        "prompt_tokens": 9,
        "new_tokens": tokens,
        "rounds": rounds,
        "mean_accepted_length": tokens / rounds,
        "tokens_per_second": 40.0 if speculates else 20.0,
        "ttft_seconds": 0.25,
        "draft_seconds": 0.1 if speculates else 0.0,
        "verify_seconds": 0.8,
        "overhead_seconds": 0.1,
        "drafted_by_position": [100] * len(acceptance) if speculates else [],
        "accepted_by_position": [100 * share for share in acceptance] if speculates else [],
    }
    return {"statistics": statistics, "finish_reason": "stop"}


def _status() -> dict[str, Any]:
    parts = [{"name": "target weights", "bytes": GIB}, {"name": "target KV cache", "bytes": GIB // 2}]
    statistics = {
        "new_tokens": 500,
        "accepted": 300,
        "accepted_by_drafter": {"suffix": 200, "model": 100},
        "drafted_by_position": [10, 5],
        "accepted_by_position": [7, 2],
        "mean_accepted_length": 2.5,
        "tokens_per_second": 31.5,
        "draft_seconds": 1.0,
        "verify_seconds": 8.0,
        "overhead_seconds": 1.0,
    }
    return {
        "model": "scripted",
        "exactness": "bitwise",
        "drafters": ["suffix", "recycling", "lookup", "model", "composite"],
        "context": 4096,
        "plan": {"total_bytes": GIB + GIB // 2, "budget_bytes": 2 * GIB, "parts": parts},
        "memory": {"resident_bytes": GIB, "planned_bytes": GIB + GIB // 2},
        "queue": {"running": 0, "waiting": 0, "limit": 16},
        "statistics": statistics,
    }
