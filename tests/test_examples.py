"""The programs in ``examples``, run as a person runs them, on SmolLM2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run(name: str, *arguments: object, heard: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, *arguments),
        input=heard,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


@contextmanager
def running(name: str, *arguments: object, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(name, *arguments), env=environment(), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_says_what_it_does(path: Path) -> None:
    text = run(path.stem, "--help").stdout
    assert "BUNDLE" in text and f"python examples/{path.name}" in text


def test_the_assistant_speaks_sentences_and_can_be_interrupted(smollm2_bundle: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running("voice_assistant", smollm2_bundle, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def say(line: str) -> None:
            process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

        say("Tell me a long story about a fox and a crow. Do not stop before it has twenty sentences.")
        assert process.stdout.readline() == "listening\n"
        assert process.stdout.readline().startswith("says: "), "nothing is spoken before the answer is over"
        say("Say hello.")
        interrupted = []
        while not (line := process.stdout.readline()).startswith("("):
            interrupted.append(line)
        assert line == "(cancelled)\n"
        process.stdin.close()
        spoken = process.stdout.read()
        assert "says: " in spoken
        assert process.wait(60) == 0


def test_the_assistant_stops_thinking_at_its_deadline(smollm2_bundle: Path) -> None:
    heard = "Tell me a long story about a fox and a crow.\n"
    assert "(deadline)" in run("voice_assistant", smollm2_bundle, "--deadline", 0.01, heard=heard).stdout


def test_a_completion_gives_way_to_the_next_keystroke_and_reads_little_again(smollm2_bundle: Path) -> None:
    lines = run("code_completion", smollm2_bundle, "--text", "def add(a, b):\n", "--seconds", 0.1).stdout.splitlines()
    steps = [line for line in lines if "tokens reused" in line]
    assert any(": cancelled, " in step for step in steps)
    last = steps[-1].split(", ")
    assert last[0].startswith(r"'def add(a") and not last[-3].endswith("cancelled")
    reused, _, prompt, *_ = last[-2].split()
    assert int(reused) >= int(prompt) - 4
    assert lines[lines.index(steps[-1]) + 1] == "def add(a, b):"


def test_the_extractor_prints_what_the_schema_asks_for(smollm2_bundle: Path) -> None:
    pytest.importorskip("llguidance")
    text = "Ada Lovelace, 36, lives in London and writes programs."
    record = json.loads(run("json_extractor", smollm2_bundle, text).stdout)
    assert list(record) == ["name", "age", "city", "occupations"]
    assert isinstance(record["name"], str) and isinstance(record["age"], int | None)
    assert all(isinstance(occupation, str) for occupation in record["occupations"])


def test_the_web_app_streams_and_lets_go_of_who_leaves(smollm2_bundle: Path) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ask(path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=60
        )

    def status() -> dict[str, Any]:
        result: dict[str, Any] = json.load(ask("/status"))
        return result

    with running("embed_in_fastapi", smollm2_bundle, "--port", port) as process:
        for _ in range(600):
            assert process.poll() is None
            try:
                status()
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        story = {"question": "Tell me a long story about a fox and a crow."}
        answer = ask("/answer", **story, max_new_tokens=24)
        assert answer.read(1) and answer.read()
        with ask("/answer", **story, max_new_tokens=1000) as left:
            assert left.read(1)
        for _ in range(600):
            if not status()["running"]:
                break
            time.sleep(0.1)
        assert status()["running"] == 0
        assert status()["new_tokens"] < 900, "the answer went on although nobody read it"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask("/answer", question="7" * 3900)
