"""Many streaming clients of one server, a third of which leave before the end; run by hand for the long version.

Example:
    python tests/serve_soak.py smollm2.pair --seconds 120 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import edge_spec

PROMPTS = (
    "Once upon a time",
    "def fibonacci(n):\n    if n < 2:\n",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "List three fruits.\n- apple\n-",
    "the cat sat on the mat. the cat sat on the mat. the cat",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9},
)
SPECULATIONS = ("auto", "auto", "auto", "suffix", "recycling", "off")
LENGTHS = (6, 16)
LEAVING = 0.33
# No request takes that long: whoever waits longer waits for ever.
STUCK_SECONDS = 300.0
_HEALTH_EVERY = 0.02
_MEMORY_EVERY = 0.5


@dataclass
class Report:
    """What came of it.

    Attributes:
        fates: how many requests met which end.
        wrong: descriptions of answers that differ from their reference.
        health_seconds: how long ``/health`` took, each time.
        memory_bytes: resident set size of the server, over time.
        left: requests that the server still has after all clients are gone.
        status: how the server's process ended.
    """

    fates: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    left: int = -1
    status: int | None = None

    def health_percentile(self, share: float) -> float:
        """Seconds within which such a share of the calls of ``/health`` was answered."""
        ordered = sorted(self.health_seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def growth(self) -> float:
        """By which share memory has grown since the first third of the time."""
        settled = self.memory_bytes[len(self.memory_bytes) // 3 :]
        return settled[-1] / settled[0] - 1


def references(bundle: Path, context: int) -> dict[tuple[int, int, int], str]:
    """What each prompt has to be continued with, by the engine itself, without a server and speculation."""
    with edge_spec.load(bundle, context=context) as engine:
        return {
            (prompt, sampling, length): engine.generate(
                text, max_new_tokens=length, speculation="off", **SAMPLINGS[sampling]
            ).text
            for prompt, text in enumerate(PROMPTS)
            for sampling in range(len(SAMPLINGS))
            for length in LENGTHS
        }


class Soak:
    """Clients of one server."""

    def __init__(self, url: str, expected: dict[tuple[int, int, int], str], seed: int = 0) -> None:
        self.report = Report()
        self._url, self._expected, self._seed = url, expected, seed

    async def run(self, clients: int, seconds: float) -> None:
        """Ask for so many seconds."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=self._url, timeout=STUCK_SECONDS, limits=limits) as client:
            await asyncio.gather(*(self._be(client, random.Random(self._seed * 1000 + n), end) for n in range(clients)))

    async def _be(self, client: httpx.AsyncClient, choice: random.Random, end: float) -> None:
        while time.monotonic() < end:
            try:
                fate = await asyncio.wait_for(self._ask(client, choice), STUCK_SECONDS)
            except Exception as error:
                fate = "failed"
                self.report.wrong.append(repr(error))
            self.report.fates[fate] += 1

    async def _ask(self, client: httpx.AsyncClient, choice: random.Random) -> str:
        key = (choice.randrange(len(PROMPTS)), choice.randrange(len(SAMPLINGS)), choice.choice(LENGTHS))
        body = {
            "prompt": PROMPTS[key[0]],
            **SAMPLINGS[key[1]],
            "max_tokens": key[2],
            "stream": True,
            "speculation": choice.choice(SPECULATIONS),
        }
        leaves_after = choice.choice([0, 1, 2, 5]) if choice.random() < LEAVING else None
        if leaves_after == 0:  # before there is anything to read
            try:
                await asyncio.wait_for(self._read(client, body, None), choice.uniform(0.001, 0.5))
            except (TimeoutError, asyncio.TimeoutError):
                return "left before the first word"
            return "answered before it could leave"
        status, text = await self._read(client, body, leaves_after)
        if status == 429:
            await asyncio.sleep(choice.uniform(0.1, 1))
            return "asked to come again"
        expected = self._expected[key]
        right = text == expected if leaves_after is None else expected.startswith(text)
        if status != 200 or not right:
            self.report.wrong.append(f"{status} {body}: {text!r} instead of {expected!r}")
            return "wrong"
        return "answered" if leaves_after is None else "left in the middle"

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any], leaves_after: int | None) -> tuple[int, str]:
        text, ended = "", False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return response.status_code, (await response.aread()).decode()
            number = 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return 500, line
                    text += event["choices"][0]["text"]
                    number += 1
                    if leaves_after is not None and number >= leaves_after:
                        return 200, text
        return (200, text) if ended else (0, text)


class Watch:
    """Asks the server for its health, and looks at its memory, from a thread of its own."""

    def __init__(self, address: str, pid: int, report: Report) -> None:
        self._address, self._pid, self._report = address, pid, report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=STUCK_SECONDS)
        looked = 0.0
        while not self._over.wait(_HEALTH_EVERY):
            started = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            self._report.health_seconds.append(time.perf_counter() - started)
            if started - looked > _MEMORY_EVERY:
                looked = started
                pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
                self._report.memory_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        connection.close()


def soak(bundle: Path, seconds: float, clients: int, parallel: int = 4, context: int = 256, seed: int = 0) -> Report:
    """Serve a bundle in a process of its own, and have clients ask it.

    Args:
        bundle: what to serve.
        seconds: how long.
        clients: how many ask at once; every one of them has a place in the queue.
        parallel: requests in the engine at once.
        context: tokens of context.
        seed: of what the clients do.
    """
    expected = references(bundle, context)
    command = [sys.executable, "-c", "import sys; from edge_spec.cli import main; sys.exit(main())", "serve"]
    options = ["--port", "0", "--queue", str(clients), "--parallel", str(parallel), "--context", str(context)]
    package = str(Path(edge_spec.__file__).parents[1])
    with subprocess.Popen(
        [*command, str(bundle), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": package},
    ) as server:
        try:
            url = _address(server)
            threading.Thread(target=_forget, args=(server,), daemon=True).start()  # a full pipe would stop it
            load = Soak(url, expected, seed)
            with Watch(url.removeprefix("http://"), server.pid, load.report):
                asyncio.run(load.run(clients, seconds))
                time.sleep(1.0)
            queue = httpx.get(f"{url}/status", timeout=60).json()["queue"]
            load.report.left = queue["running"] + queue["waiting"]
            server.send_signal(signal.SIGTERM)
            load.report.status = server.wait(60)
        finally:
            server.kill()
    return load.report


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"Serving \S+ at (\S+)/ ", line):
            return found.group(1)
    raise RuntimeError("the server did not come up")


def _forget(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if '"error"' in line or "Traceback" in line:
            print(line, end="", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--parallel", type=int, default=4)
    arguments = parser.parse_args(argv)
    report = soak(arguments.bundle, arguments.seconds, arguments.clients, arguments.parallel)
    for fate, number in sorted(report.fates.items()):
        print(f"{number:6} {fate}")
    for share in (0.5, 0.99, 1.0):
        print(f"/health: {share:.0%} within {1000 * report.health_percentile(share):.1f} ms")
    first, last = report.memory_bytes[0], report.memory_bytes[-1]
    print(f"memory: {first / 2**20:.0f} MiB at first, {last / 2**20:.0f} MiB at last, growth {report.growth:.1%}")
    print(f"left behind: {report.left}; the server ended with {report.status}")
    for wrong in report.wrong[:10]:
        print("WRONG:", wrong)
    return int(bool(report.wrong or report.left or report.status))


if __name__ == "__main__":
    sys.exit(main())
