"""``edge-spec distill`` from prompts to a bundle whose draft was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import edge_spec
from edge_spec.bench.summary import Speedup
from edge_spec.bundle import read_manifest
from edge_spec.cli import main
from edge_spec.distill.verdict import Verdict
from edge_spec.export import export_pair
from tiny_models import CHAT_TEMPLATE, random_model, save_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(num_hidden_layers=4, max_position_embeddings=512)
    return save_checkpoint(tmp_path_factory.mktemp("target"), model, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def bundle(target: Path, tmp_path: Path) -> Path:
    return export_pair(target, None, tmp_path / "bundle", recipe="w8a8", check=False).path


def prompts(path: Path, count: int = 12) -> Path:
    lines = [json.dumps({"prompt": f"Number {number} says"}) for number in range(count)]
    path.write_text("\n".join(lines))
    return path


def distill(bundle: Path, tmp_path: Path, *options: str) -> list[str]:
    file = prompts(tmp_path / "log.jsonl")
    settings = ["--prompts", str(file), "--tokens", "200", "--batch", "4", "--epochs", "1", "--draft-vocab", "64"]
    return ["distill", str(bundle), "--work", str(tmp_path / "work"), *settings, *options]


def test_a_bundle_gets_a_draft_and_is_told_whether_it_pays(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*distill(bundle, tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    head = read_manifest(bundle).head
    assert head is not None and head.kind == "eagle3" and head.taps == (1, 2)
    assert report["bundle"] == str(bundle) and report["texts"]["answer_tokens"] >= 200
    assert report["verdict"]["identical"] and report["verdict"]["sentence"]
    assert set(report["verdict"]["figures"]) == {"off", "free", "auto"}
    with edge_spec.load(bundle) as engine:
        plain = engine.generate("Number 3 says", max_new_tokens=24, speculation="off")
        assert engine.generate("Number 3 says", max_new_tokens=24, speculation="head").token_ids == plain.token_ids


def test_what_is_measured_is_the_draft_that_was_made(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[bool, bool, str]] = []

    def watched(path: Path, questions: Any, loading: dict[str, Any], *arguments: Any) -> Verdict:
        manifest = read_manifest(path)
        measured.append((manifest.head is not None, manifest.draft is not None, loading["drafter"]))
        return Verdict({"auto": _Figures(Speedup(2.0, None, None))}, Speedup(1.1, None, None), True, 0)  # type: ignore[dict-item]

    monkeypatch.setattr("edge_spec.distill.distiller.judge", watched)
    assert main(distill(bundle, tmp_path)) == 0
    assert main(distill(bundle, tmp_path, "--kind", "tiny", "--layers", "1")) == 0
    assert measured == [(True, False, "head"), (True, True, "model")]


def test_a_run_goes_on_where_it_was_and_a_head_can_be_improved_on(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "with-draft"
    assert main([*distill(bundle, tmp_path), "--output", str(output), "--no-bench"]) == 0
    assert read_manifest(bundle).head is None
    texts = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "work" / "texts").iterdir())
    shutil.rmtree(output)
    assert main([*distill(bundle, tmp_path), "--output", str(output), "--no-bench"]) == 0
    assert texts == sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "work" / "texts").iterdir())
    assert main([*distill(bundle, tmp_path), "--no-bench"]) == 0
    assert main([*distill(bundle, tmp_path), "--no-bench"]) == 0  # a target that has a head is the same target
    first = read_manifest(bundle).head
    again = [*distill(bundle, tmp_path), "--no-bench", "--start-from", str(tmp_path / "work" / "head")]
    again[again.index("--work") + 1] = str(tmp_path / "second")
    place = again.index("--draft-vocab")
    again = again[:place] + again[place + 2 :]
    assert main(again) == 2  # not in the place of a head that another run has made
    assert "(--overwrite)" in capsys.readouterr().err
    assert read_manifest(bundle).head == first
    assert not (tmp_path / "second").exists()
    assert main([*again, "--overwrite"]) == 0
    second = read_manifest(bundle).head
    assert first is not None and second is not None and first != second


def test_the_checkpoint_may_have_moved(tmp_path: Path) -> None:
    model = random_model(num_hidden_layers=4, max_position_embeddings=512)
    target = save_checkpoint(tmp_path / "target", model, chat_template=CHAT_TEMPLATE)
    bundle = export_pair(target, None, tmp_path / "bundle", recipe="w8a8", check=False).path
    moved = target.rename(tmp_path / "moved")
    assert main([*distill(bundle, tmp_path), "--no-bench"]) == 2
    assert not (tmp_path / "work").exists()
    assert main([*distill(bundle, tmp_path), "--no-bench", "--target", str(moved)]) == 0
    manifest = read_manifest(bundle)
    assert manifest.head is not None and manifest.target.source == str(moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "many"], "no number"),
        (["--start-from", "nowhere"], "leave it out"),  # beside --draft-vocab
        (["--target", "nowhere"], "nowhere"),
        (["--epochs", "0"], "epochs is 0"),
        (["--disk", "tiny"], "tiny"),
    ],
)
def test_slips_are_told(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    try:
        status = main([*distill(bundle, tmp_path), *options])
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2 and message in capsys.readouterr().err
    assert read_manifest(bundle).head is None


def test_a_file_with_a_single_prompt_is_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = distill(bundle, tmp_path)
    prompts(tmp_path / "log.jsonl", 1)
    assert main(arguments) == 2
    assert "holds 1 prompts, expected at least 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gain", "pays", "words"),
    [
        (Speedup(1.3, 1.2, 1.4), True, "The draft pays: 1.30 times"),
        (Speedup(0.9, 0.85, 0.95), False, "does not pay"),
        (Speedup(1.1, 0.9, 1.3), None, "cannot be told"),
        (Speedup(1.1, None, None), None, "cannot be told"),
    ],
)
def test_the_verdict_says_plainly_what_was_measured(gain: Speedup, pays: bool | None, words: str) -> None:
    figures: Any = {"auto": _Figures(Speedup(2.0, 1.9, 2.1))}
    verdict = Verdict(figures, gain, True, 0)
    assert verdict.pays is pays and words in verdict.sentence() and "2.00 times that of plain" in verdict.sentence()


class _Figures:
    answers = 5

    def __init__(self, decode_speedup: Speedup) -> None:
        self.decode_speedup = decode_speedup
