"""``edge-spec inspect``: what it shows of a bundle."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec import cli
from edge_spec.plain_file import file_sha256


def edge_spec(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, then ``code``, which knows the ``status``."""
    program = f"import sys; from edge_spec.cli import main; status = main(sys.argv[1:]); {code or 'sys.exit(status)'}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_inspect_shows_what_a_person_wants_to_know(described_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(described_bundle)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "pair bundle for cpu, 3.0 MiB, made by edge-spec 0.1.0",
        "300 ids, 4 special; BOS none, EOS 2, 7",
        "512 tokens",
        "temperature 0.7",
        "target: coder-1.5b.gguf",
        "draft: none",
        "llama: 2 layers, hidden size 64, MLP 128",
        "4 heads of 16 on 2 KV heads",
        "w8a8: embedding int8, attention w8a8",
        "3.0 MiB, w8a8 ones as int8",
        "target/model.onnx, verifies chains and trees, KV cache in float32",
        "512 B in float32 per token",
        "KL to float32 0.0412 mean, 0.1234 p95 nats; same likeliest token 95.0% of 160",
        "ab" * 32,
        file_sha256(described_bundle / "target" / "model.onnx"),
    ):
        assert fact in text
    assert max(map(len, text.splitlines()[1:])) <= 120


@pytest.mark.parametrize(("recipe", "blocks"), [("int4-128", "128"), ("int4", "32"), ("w8a8", None)])
def test_inspect_tells_the_size_of_int4_blocks(
    recipe: str, blocks: str | None, tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(tiny_bundle(recipe=recipe))]) == 0
    found = re.search(r"^  int4 blocks +(\d+) weights each$", capsys.readouterr().out, re.MULTILINE)
    assert (None if found is None else found[1]) == blocks


def test_inspect_json_is_the_manifest(described_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(described_bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((described_bundle / "manifest.json").read_text())


def test_inspect_needs_neither_numpy_nor_onnxruntime(described_bundle: Path) -> None:
    loaded = "print(sorted({'numpy', 'onnxruntime', 'tokenizers', 'jinja2', 'onnx', 'torch'} & sys.modules.keys()))"
    process = edge_spec("inspect", str(described_bundle), code=loaded)
    assert process.stdout.splitlines()[-1] == "[]"
