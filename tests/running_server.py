"""A server in a thread of the test, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from edge_spec import Chunk, Engine
from edge_spec.serve.app import create_app
from edge_spec.serve.desk import Desk
from edge_spec.serve.server import Server, listen
from edge_spec.serve.settings import ServeSettings

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Running:
    """A server.

    Attributes:
        url: where it is.
        desk: where its requests are.
        client: asks it.
    """

    url: str
    desk: Desk
    client: httpx.Client

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 8, **fields})

    def refusal(self, status: int = 400, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
        """Ask for something that is refused; return the error."""
        body = {"messages": HELLO} if path.endswith("chat/completions") else {}
        response = self.client.post(path, json={**body, **fields})
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Running]:
    """Serve an engine; on leaving, the server ends in order."""
    app = create_app(engine, ServeSettings(**{"model": MODEL, **settings}))
    server = Server(app, 5.0)
    opened = listen("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([opened])))
    thread.start()
    try:
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{opened.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(url, app.state.desk, client)
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        opened.close()
        assert not thread.is_alive()
        loop.close()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


def slowed(engine: Engine, seconds: float) -> None:
    """Have an engine rest before every chunk."""
    stream = engine.stream

    def slow(*args: Any, **options: Any) -> Iterator[Chunk]:
        return _resting(stream(*args, **options), seconds)

    engine.stream = slow  # type: ignore[method-assign]


def _resting(chunks: Iterator[Chunk], seconds: float) -> Iterator[Chunk]:
    for chunk in chunks:
        time.sleep(seconds)
        yield chunk


def scripted(engine: Engine, pieces: Sequence[str]) -> None:
    """Have an engine say this, one piece a chunk, whatever it would have said."""
    stream = engine.stream

    def say(*args: Any, **options: Any) -> Iterator[Chunk]:
        *_, last = stream(*args, **{**options, "max_new_tokens": 1})
        assert last.completion is not None
        completion = type(last.completion)("".join(pieces), (1,), "stop", last.completion.statistics)
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            yield Chunk(piece, (1,), ("target",), completion if is_last else None, pieces=(piece,))

    engine.stream = say  # type: ignore[method-assign]
