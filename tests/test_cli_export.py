"""``edge-spec export``: what it prints, and what it leaves behind when it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge_spec import cli
from edge_spec.cli import export
from edge_spec.export.recipe import RECIPES
from gguf_files import METADATA, write_model


def test_recipes_offered_are_those_that_exist() -> None:
    assert set(export.RECIPES) == set(RECIPES)


def test_export_prints_what_it_made_and_does_not_overwrite_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = write_model(tmp_path / "tiny.gguf", metadata=METADATA), tmp_path / "tiny.pair"
    command = ["export", "--target", str(model), "--output", str(output), "--recipe", "fp16"]
    assert cli.main(command) == 0
    assert "fp16: embedding fp16" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "already exists" in capsys.readouterr().err
    assert cli.main([*command[:-1], "fp32", "--overwrite", "--no-check", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["target"]["recipe"]["name"] == "fp32"
    assert manifest["target"]["quality"] is None


def test_export_that_strays_too_far_exits_with_1_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The random model's logits are far steeper than a trained one's, so that rounding turns them over.
    model = write_model(tmp_path / "steep.gguf", metadata=METADATA)
    assert cli.main(["export", "--target", str(model), "--output", str(tmp_path / "out.pair"), "--recipe", "int4"]) == 1
    assert "strays too far" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [model]


def test_failed_export_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert cli.main(["export", "--target", str(truncated), "--output", str(tmp_path / "out.pair")]) == 2
    assert "cut.gguf" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [truncated]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_told_to_end_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", metadata=METADATA)
    code = (
        "import os, signal, sys; from edge_spec import cli; from edge_spec.progress_bars import ProgressBars; "
        f"signal.signal({number.value}, signal.default_int_handler if {number.value} == 2 else signal.SIG_DFL); "
        f"ProgressBars.__call__ = lambda *step: os.kill(os.getpid(), {number.value}); sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = ["export", "--target", str(model), "--output", str(tmp_path / "new" / "tiny.pair")]
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 128 + number
    assert "Traceback" not in process.stderr
    assert sorted(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(("place", "folders"), [("both", {"draft", "draft-cpu"}), ("cpu", {"draft-cpu"})])
def test_a_draft_can_be_written_for_another_device_than_the_target(
    place: str, folders: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "tiny.gguf", metadata=METADATA))
    output = tmp_path / "tiny.pair"
    models = ["--target", model, "--draft", model, "--output", str(output), "--no-check"]
    assert cli.main(["export", *models, "--device", "cuda", "--draft-device", place, "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["cpu_draft"] is not None
    assert (manifest["draft"] is None) == (place == "cpu")
    assert {file.parent.name for file in output.rglob("*.onnx")} == {"target", *folders}


def test_a_draft_for_a_gpu_beside_a_target_for_the_cpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "tiny.gguf", metadata=METADATA))
    models = ["--target", model, "--draft", model, "--output", str(tmp_path / "tiny.pair")]
    assert cli.main(["export", *models, "--draft-device", "cuda"]) == 2
    assert "the target is for the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "stored", "said"),
    [
        ("cpu", ["w8a8"], ""),
        ("cuda", ["int4"], "its draft_recipe is not for cuda, whose own is taken"),
        ("both", ["int4", "int4-128"], "its draft_recipe is not for cuda, so each device's own is taken"),
    ],
)
def test_the_draft_of_a_pair_recipe_is_stored_as_it_says_where_that_runs(
    place: str, stored: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "tiny.gguf", metadata=METADATA)
    source = 'source = "tiny.gguf"'
    (tmp_path / "pair.toml").write_text(f'[target]\n{source}\n[draft]\n{source}\nrecipe = "w8a8"\n')
    words = ["export", "--pair", str(tmp_path / "pair.toml"), "--output", str(tmp_path / "pair"), "--no-check"]
    assert cli.main([*words, "--device", "cuda", "--draft-device", place, "--json"]) == 0
    shown = capsys.readouterr()
    manifest = json.loads(shown.out)
    drafts = [manifest[name] for name in ("draft", "cpu_draft") if manifest[name] is not None]
    assert [record["recipe"]["name"] for record in drafts] == stored
    assert said in shown.err and (said or "draft_recipe" not in shown.err)
