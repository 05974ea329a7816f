"""How a server ends: nothing new is taken in, what runs may end, and a second signal ends everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from running_server import HELLO, wait_until
from tiny_models import CHAT_TEMPLATE

SCRIPT = """
import sys
import edge_spec
from edge_spec.serve.app import create_app
from edge_spec.serve.server import Server, listen, run
from edge_spec.serve.settings import ServeSettings
from running_server import slowed
engine = edge_spec.load(sys.argv[1])
slowed(engine, 0.05)
opened = listen("127.0.0.1", 0)
print(opened.getsockname()[1], flush=True)
with engine:
    run(Server(create_app(engine, ServeSettings("tiny", grace_seconds=float(sys.argv[2]))), float(sys.argv[2])), opened)
print("in order", flush=True)
"""
BODY = {"messages": HELLO, "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle(chat_template=CHAT_TEMPLATE, eos=None)


@contextmanager
def process(bundle: Path, grace: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A slow server and its address."""
    command = [sys.executable, "-c", SCRIPT, str(bundle), str(grace)]
    tests = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    # A shell that starts us in the background has its children ignore the signal.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heeded) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            yield server, url
        finally:
            server.kill()


def running(url: str) -> bool:
    return bool(httpx.get(f"{url}/status").json()["queue"]["running"])


def test_what_runs_ends_within_the_grace_period(bundle: Path) -> None:
    with process(bundle, 60) as (server, url), httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: not reachable(url))
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.wait(30) == 0
        assert server.stdout is not None and server.stdout.read() == "in order\n"


def reachable(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True


def test_what_takes_longer_is_told_so(bundle: Path) -> None:
    with process(bundle, 0.3) as (server, url):
        answers: list[httpx.Response] = []
        asked = [{**BODY, "stream": True}, BODY]

        def ask(body: dict[str, Any]) -> None:
            answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60))

        threads = [threading.Thread(target=ask, args=(body,)) for body in asked]
        for thread in threads:
            thread.start()
        wait_until(lambda: running(url))
        server.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(30)
        assert server.wait(30) == 0
    whole, streamed = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down"
    assert streamed.status_code == 503 or ('"shutting_down"' in streamed.text and "[DONE]" not in streamed.text)


def test_a_second_signal_ends_everything_at_once(bundle: Path) -> None:
    # An answer so long that it still runs when a busy machine comes to send the second signal.
    with (
        process(bundle, 600) as (server, url),
        httpx.Client(timeout=60) as client,
        client.stream(
            "POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True, "max_tokens": 190}
        ) as response,
    ):
        next(response.iter_lines())
        server.send_signal(signal.SIGINT)
        wait_until(lambda: not reachable(url))
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 130
