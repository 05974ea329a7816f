"""``edge-spec distill`` with folders, prompts and settings that are wrong: told at once, and nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_spec.bundle import MANIFEST, read_manifest
from edge_spec.cli import main
from edge_spec.distill.head_files import CONFIG, WEIGHTS, read_head
from edge_spec.distill.tap_files import HEADER, TapFiles
from edge_spec.distill.training_state import STATE
from edge_spec.distill.work_folder import disk_errors_told, work_folder
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export import add_head, export_pair
from tiny_models import CHAT_TEMPLATE, random_model, save_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the checkpoint it was made from, another checkpoint, prompts, and a finished working folder."""
    folder = tmp_path_factory.mktemp("made")
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "max_position_embeddings": 512}
    target = save_checkpoint(folder / "target", random_model(**sizes), chat_template=CHAT_TEMPLATE)
    save_checkpoint(folder / "other", random_model(**sizes, hidden_size=32), chat_template=CHAT_TEMPLATE)
    save_checkpoint(folder / "alike", random_model(**sizes, seed=9), chat_template=CHAT_TEMPLATE)
    export_pair(target, None, folder / "bundle", recipe="w8a8", check=False)
    (folder / "log.jsonl").write_text("\n".join(json.dumps({"prompt": f"Number {n} says"}) for n in range(6)))
    assert main(distill(folder, folder / "work", "--output", str(folder / "made"))) == 0
    return folder


def distill(made: Path, work: Path, *options: str) -> list[str]:
    settings = ["--tokens", "60", "--batch", "4", "--epochs", "1", "--draft-vocab", "64", "--threads", "1"]
    prompts = ["--prompts", str(made / "log.jsonl"), "--no-bench"]
    return ["distill", str(made / "bundle"), "--work", str(work), *settings, *prompts, *options]


def refused(made: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run what must be refused and leave the bundle alone; return what is said."""
    before = (made / "bundle" / MANIFEST).read_bytes()
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2 and (made / "bundle" / MANIFEST).read_bytes() == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "{made}/other"], "has hidden_size 32, but the target of"),
        (["--target", "{made}/alike"], "is not what this bundle was made of"),
        (["--kind", "tiny", "--target", "{made}/other"], "has hidden_size 32, but the target of"),
        (["--output", "{made}/made"], "already exists"),
        (["--output", "{made}/target", "--overwrite"], "is not a pair bundle"),
        (["--start-from", "{made}/other"], "leave it out"),  # with --draft-vocab
        (["--kind", "tiny", "--start-from", "{made}/work/head", "--layers", "2"], "leave it out"),
        (["--work", ""], "the path is empty"),
        (["--output", ""], "the path is empty"),
        (["--minutes", "inf"], "expected a finite number above 0"),
        (["--draft-vocab", "\u0666\u0664"], "no number of ids"),
        (["--kind", "tiny", "--layers", "9"], "but the target has 4"),
        (["--work", "{made}/bundle"], "lies in the bundle"),
        (["--work", "{made}/bundle/target/work"], "lies in the bundle"),
        (["--work", "{made}/log.jsonl"], "cannot be written"),
        (["--device", "tpu"], "expected 'cpu' or 'cuda'"),
        (["--threads", "0"], "threads is 0, expected 1"),
        (["--threads", "100000"], "threads is 100000, expected 1"),
        (["--batch", "0"], "batch is 0"),
        (["--disk", "1"], "no room for the first texts"),
        (["--target", ""], "it is empty"),
        (["--steps", "1000"], "expected at most 16"),
        (["--seed", str(1 << 70)], "seed is"),
        (["--tokens", "9" * 5000], "expected 15 digits at most"),
    ],
)
def test_what_would_fail_in_the_end_fails_before_a_text_is_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    work = tmp_path / "work"
    told = refused(made, distill(made, work, *(option.format(made=made) for option in options)), capsys)
    assert message in told and not work.exists()


@pytest.mark.parametrize(
    ("folder", "kind", "message"),
    [
        ("nowhere", "head", "holds no draft, as there is no config.json"),
        ("other", "head", "; expected one that was trained here"),
        ("work/head", "tiny", "holds a head, not a tiny model; go on from it with --kind head"),
        ("tiny", "head", "holds a tiny model, not a head; go on from it with --kind tiny"),
    ],
)
def test_a_draft_of_another_kind_is_not_gone_on_from(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, kind: str, message: str
) -> None:
    (made / "tiny").mkdir(exist_ok=True)
    for name in ("config.json", "draft_ids.json"):
        (made / "tiny" / name).write_text("{}")
    arguments = distill(made, tmp_path / "work", "--kind", kind, "--start-from", str(made / folder))
    place = arguments.index("--draft-vocab")
    assert message in refused(made, arguments[:place] + arguments[place + 2 :], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--learning-rate", "0.5"], "saved by a run with learning_rate 0.001, not 0.5"),
        (["--draft-vocab", "32"], "saved by a run with draft_vocabulary 64, not 32"),
    ],
)
def test_a_run_that_is_begun_is_not_given_other_options(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    work = Path(shutil.copytree(made / "work", tmp_path / "work"))
    file = work / "texts" / "texts-00000.bin"
    before = file.read_bytes()
    told = refused(made, distill(made, work, *options), capsys)
    assert message in told and file.read_bytes() == before


def test_a_run_that_is_begun_is_given_no_more_texts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, work = tmp_path / "log.jsonl", tmp_path / "work"
    log.write_text("\n".join(json.dumps({"prompt": f"Number {n} says"}) for n in range(80)))
    begin = distill(made, work, "--prompts", str(log), "--output", str(tmp_path / "with-draft"), "--overwrite")
    assert main(begin) == 0
    told = refused(made, [*begin, "--tokens", "900k"], capsys)
    assert "and is to have 900,000; ask for" in told and len(list((work / "texts").glob("*.bin"))) == 1
    assert main([*begin, "--tokens", "900k", "--disk", "1"]) == 0  # there was no room for more


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages[0].content }}\nA:", "puts nothing before a message"),
        ("Q: {{ messages[0].content }}", "puts nothing behind a message"),
    ],
)
def test_the_shipped_prompts_need_a_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, message: str
) -> None:
    target = save_checkpoint(tmp_path / "target", random_model(), chat_template=template)
    export_pair(target, None, tmp_path / "bundle", recipe="w8a8", check=False)
    assert main(["distill", str(tmp_path / "bundle"), "--work", str(tmp_path / "work"), "--epochs", "1"]) == 2
    told = capsys.readouterr().err
    assert message in told and "(--prompts)" in told and not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"token_ids": [99999]}', "line 2: Token id 99999 is out of range"),
        ('{"prompt": "\\ud800"}', "line 2: the text holds"),
        ("[" * 100_000, "line 2: not valid JSON"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line_before_a_text_is_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(['{"prompt": "a"}', line, '{"prompt": "b"}']))
    told = refused(made, distill(made, tmp_path / "work", "--prompts", str(file)), capsys)
    assert message in told and not list((tmp_path / "work").rglob("texts-*"))


def test_a_disk_limit_without_room_for_the_first_texts_is_told(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "allow more (--disk)" in refused(made, distill(made, tmp_path / "work", "--disk", "1KB"), capsys)


def test_training_that_fails_says_so_and_writes_no_head(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = distill(made, tmp_path / "work", "--learning-rate", "1e30", "--epochs", "3")
    assert "lower learning rate" in refused(made, arguments, capsys)
    assert not (tmp_path / "work" / "head" / WEIGHTS).exists()


def entries(work: Path, **changed: Any) -> None:
    """Change the line of JSON that a file of texts begins with."""
    path = work / "texts" / "texts-00000.bin"
    line, rest = path.read_bytes().split(b"\n", 1)
    text = json.dumps({**json.loads(line), **changed}).encode()
    path.write_bytes(text + b" " * (-(len(text) + 1) % 64) + b"\n" + rest)


def header(work: Path, **changed: Any) -> None:
    path = work / "texts" / HEADER
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def contents(work: Path, byte: int) -> None:
    path = work / "texts" / "texts-00000.bin"
    line, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(line + b"\n" + bytes([byte]) * len(rest))


def state(work: Path, **changed: Any) -> None:
    saved = torch.load(work / "head" / STATE, weights_only=True)
    saved["state"].update(changed)
    torch.save(saved, work / "head" / STATE)


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda work: entries(work, tokens=[-5] * 5, prompts=[1] * 5), "is damaged"),
        (lambda work: entries(work, tokens=["x"] * 5, prompts=[1] * 5), "is damaged"),
        (lambda work: entries(work, tokens=[10**30] * 5, prompts=[1] * 5), "is damaged"),
        (lambda work: (work / "texts" / "texts-00000.bin").write_bytes(b"[" * 100_000), "is damaged"),
        (lambda work: contents(work, 0xFF), "token ids below 0"),
        (lambda work: contents(work, 0x7F), "which the target lacks"),
        (lambda work: header(work, hidden_size="x"), "cannot be read"),
        (lambda work: header(work, taps=["x"]), "cannot be read"),
        (lambda work: (work / "texts" / HEADER).write_text("[" * 100_000), "cannot be read"),
        (lambda work: (work / "head" / STATE).write_bytes(b"junk"), "cannot be read"),
        (lambda work: torch.save({"run": None}, work / "head" / STATE), "cannot be read"),
        (lambda work: torch.save(_Runs(work / "ran"), work / "head" / STATE), "other things than numbers"),
        (lambda work: state(work, step="x"), "step is no count"),
        (lambda work: state(work, epoch=-1), "epoch is no count"),
        (lambda work: state(work, best_length=float("nan")), "best_length is no number"),
        (lambda work: state(work, seconds="x"), "seconds is no number"),
    ],
)
def test_a_damaged_working_folder_is_refused_and_runs_nothing(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    work = Path(shutil.copytree(made / "work", tmp_path / "work"))
    spoil(work)
    assert message in refused(made, distill(made, work, "--epochs", "2"), capsys)
    assert not (work / "ran").exists()


def test_a_damaged_log_does_not_stop_a_run(made: Path, tmp_path: Path) -> None:
    work = Path(shutil.copytree(made / "work", tmp_path / "work"))
    (work / "head" / "training.jsonl").write_bytes(b"\xff junk\n[]\n{}\n")
    assert main(distill(made, work, "--epochs", "2", "--output", str(tmp_path / "with-draft"))) == 0


def test_two_runs_in_one_folder_are_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with work_folder(tmp_path / "work"):
        assert "Another run is at work" in refused(made, distill(made, tmp_path / "work"), capsys)
    with work_folder(tmp_path / "work"):
        pass


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / ".training.state.new").write_text("half")
    with pytest.raises(EdgeSpecError, match="No space left"), disk_errors_told(tmp_path):
        Path("/dev/full").write_text("x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("d2t", torch.full((64,), 1 << 40)), ("d2t", -torch.arange(64)), ("norm.weight", torch.full((64,), torch.nan))],
)
def test_a_head_to_start_from_is_checked(made: Path, tmp_path: Path, name: str, value: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    head = Path(shutil.copytree(made / "work" / "head", tmp_path / "head"))
    save_file({**load_file(head / WEIGHTS), name: value}, head / WEIGHTS)
    with pytest.raises(CheckpointError, match=name):
        read_head(head)
    (head / CONFIG).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="holds no head"):
        read_head(head)


def test_a_bundle_may_be_named_by_where_one_stands(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))
    monkeypatch.chdir(bundle)
    arguments = distill(made, tmp_path / "work")
    arguments = [".", *arguments[4:]]
    assert main(["distill", *arguments, "--output", str(tmp_path / "with-draft")]) == 0
    assert len(TapFiles(tmp_path / "bundle.distill" / "texts"))


def test_training_takes_as_many_threads_as_it_is_given(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    work = Path(shutil.copytree(made / "work", tmp_path / "work"))
    assert main(distill(made, work, "--output", str(tmp_path / "with-draft"))) == 0
    assert asked == [1, 7]


def test_texts_that_could_not_be_written_take_no_space(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Path(shutil.copytree(made / "work", tmp_path / "work"))
    files = TapFiles(work / "texts")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EdgeSpecError, match="No space left"):
        files.append([files.read(0)])
    assert not list((work / "texts").glob(".*"))


@pytest.mark.parametrize("named", ["link", "."])
def test_a_bundle_behind_a_link_gets_the_draft_itself(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    bundle = Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))
    (tmp_path / "link").symlink_to("bundle")
    monkeypatch.chdir(bundle if named == "." else tmp_path)
    add_head(named, made / "work" / "head")
    assert read_manifest(bundle).head is not None and (tmp_path / "link").is_symlink()
