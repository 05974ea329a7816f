"""``edge-spec serve``: what it refuses, and how it serves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from edge_spec import cli
from edge_spec.export.cached_bundle import cached_bundle
from running_server import HELLO
from tiny_models import CHAT_TEMPLATE, random_model, save_checkpoint


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_without_a_key_nobody_else_may_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        assert "everybody on the network" in fails(capsys, "nowhere.pair", "--host", host)
    # With a key, or on this machine only, it is the bundle that is missing.
    os.environ.pop("EDGE_SPEC_API_KEY", None)
    for arguments in (
        ["--host", "::1"],
        ["--host", "0.0.0.0", "--insecure-no-key"],
        ["--host", "0.0.0.0", "--api-key", "12345678"],
    ):
        assert "nowhere.pair" in fails(capsys, "nowhere.pair", "--port", "0", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.pair", "--parallel", "0"], "parallel"),
        (["x.pair", "--queue", "-1"], "queue"),
        (["x.pair", "--api-key", "short"], "at least 8"),
        (["x.pair", "--port", "99999"], "--port is 99999, expected 0 to 65535"),
        (["x.pair", "--port", "-1"], "--port is -1"),
        (["x.pair", "--name", "two words"], "name"),
        (["x.pair", "--record", "/nowhere/prompts"], "/nowhere/prompts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in fails(capsys, *arguments)


@pytest.mark.parametrize("arguments", [[], ["x.pair", "--target", "y.gguf"], ["x.pair", "--draft", "y.gguf"]])
def test_models_come_from_a_bundle_or_from_checkpoints(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", *arguments])


def served(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from edge_spec.cli import main; sys.exit(main())", "serve"]
    return subprocess.Popen(
        [*command, *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"Serving \S+ at (\S+)/ ", line):
            return found.group(1)
    raise AssertionError("".join(said))


def test_a_bundle_is_served_until_a_signal_comes(tiny_bundle: Callable[..., Path]) -> None:
    bundle = tiny_bundle(chat_template=CHAT_TEMPLATE)
    server = served(bundle, "--name", "little", EDGE_SPEC_API_KEY="correct-horse")
    try:
        url = address(server)
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer correct-horse"}
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "little"
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4}, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] in range(1, 5)  # a drawn text may end early
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


def test_checkpoints_are_served_and_exported_once(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", random_model(), chat_template=CHAT_TEMPLATE)
    for said in ("Exported to", "was exported before"):
        server = served("--target", target, "--recipe", "fp32", EDGE_SPEC_CACHE=str(tmp_path / "cache"))
        try:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if "Serving target at" in line:
                    break
            assert said in "".join(lines)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
            server.wait()


def test_a_cached_bundle_belongs_to_its_models_and_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_checkpoint(tmp_path / "target", random_model())

    def bundle(**options: str) -> Path:
        return cached_bundle(str(target), None, folder=tmp_path / "cache", **options)[0]  # type: ignore[arg-type]

    first = bundle(recipe="fp32")
    assert bundle(recipe="fp32") == first
    assert bundle(recipe="int4") != first
    (first / "manifest.json").write_text("{}")
    assert bundle(recipe="fp32") == first  # exported again
    data = first / "target" / "model.onnx.data"
    size = data.stat().st_size
    os.truncate(data, size - 1)
    assert bundle(recipe="fp32") == first and data.stat().st_size == size
    monkeypatch.setattr("edge_spec.export.cached_bundle.integer_products_saturate", lambda: "as nowhere else")
    assert bundle(recipe="fp32") != first
    monkeypatch.undo()
    weights = next(target.glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    assert bundle(recipe="fp32") != first
