"""Benchmarks from the command line to the files, on a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from device_trees import jetson
from edge_spec import Chunk, PromptRecorder, Session, cli
from edge_spec.bench import runner
from edge_spec.device_facts import DeviceFacts, read_device_facts
from edge_spec.errors import LogitsError
from tiny_models import CHAT_TEMPLATE

PNG = b"\x89PNG"
TURNS = (["one two one two", "and again"], ["aaaa"], ["the cat and the hat"])

TinyBundle = Callable[..., Path]


@pytest.fixture
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle(recipe="w8a8", chat_template=CHAT_TEMPLATE)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"question_id": f"q{number}", "category": category, "turns": turns}
        for number, (category, turns) in enumerate(zip(("qa", "qa", "rag"), TURNS, strict=True), 1)
    ]
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def bench(*arguments: str | Path) -> int:
    return cli.main(["bench", *map(str, arguments), "--max-new-tokens", "12"])


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert bench(*arguments, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def watch_streams(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda call: None) -> list[Any]:
    """Note what engines are asked for, and call ``before`` with the number of the call."""
    calls: list[Any] = []
    stream = Session.stream

    def watched(self: Session, prompt: Any, **options: Any) -> Iterator[Chunk]:
        calls.append((prompt, options))
        before(len(calls))
        return stream(self, prompt, **options)

    monkeypatch.setattr(Session, "stream", watched)
    return calls


def test_a_run_writes_records_tables_and_plots(
    tiny_bundle: TinyBundle, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tiny_bundle(recipe="w8a8", draft="close", chat_template=CHAT_TEMPLATE)
    output = tmp_path / "new" / "report"
    assert (
        bench(
            bundle, "--prompts", prompts, "--modes", "model:max_draft=4", "--exactness", "bitwise", "--output", output
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "3 of 3" in text and "question answering" in text and str(output) in text

    report = json.loads((output / "report.json").read_text("utf-8"))
    assert report["interruption"] is None
    assert report["command_line"].startswith("edge-spec bench ")
    assert report["machine"]["onnxruntime"] and report["peak_memory_bytes"] > 1 << 20
    assert report["bundle"]["digest"] == json.loads((bundle / "manifest.json").read_text())["digest"]
    assert [mode["name"] for mode in report["modes"]] == ["off", "model:max_draft=4"]
    assert len(report["answers"]) == report["planned"] == 6
    assert {answer["place"] for answer in report["answers"] if answer["mode"] == "off"} == {0, 1}
    for answer in report["answers"]:
        assert answer["identical"]
        assert answer["wall_seconds"] >= answer["statistics"]["total_seconds"] > 0
        assert answer["statistics"]["new_tokens"] <= 12
    assert report["summary"]["overall"]["model:max_draft=4"]["decode_speedup"]["ratio"] > 0
    assert report["summary"]["overall"]["model:max_draft=4"]["mean_accepted_length"] > 1
    assert set(report["summary"]["categories"]) == {"question answering", "retrieval-augmented generation"}

    markdown = (output / "report.md").read_text("utf-8")
    assert "## Decoding speedup by category" in markdown and "Incomplete" not in markdown
    plots = sorted(path.name for path in output.glob("*.png"))
    assert plots == ["acceptance.png", "costs.png", "speedup.png", "time_shares.png"]
    for name in plots:
        assert f"]({name})" in markdown
        assert (output / name).read_bytes().startswith(PNG)
    assert sorted(path.suffix for path in output.iterdir()) == [".json", ".md", *[".png"] * 4]


def test_json_on_stdout_is_the_report(bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, bundle, "--prompts", prompts, "--modes", "off")
    assert report["format"] == "edge-spec benchmark"
    assert report["summary"]["overall"]["off"]["answers"] == 3


def test_the_prompts_that_come_along_are_measured_and_what_does_not_fit_is_counted(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(bundle, "--modes", "lookup", "--per-category", "1") == 0
    text = capsys.readouterr().out
    assert "turns could not be asked" in text
    assert "leaves no room in the context of 256" in text
    report = report_of(capsys, bundle, "--modes", "lookup", "--per-category", "1")
    assert len(report["answers"]) // 2 + len(report["skipped"]) == 6
    assert {skip["category"] for skip in report["skipped"]} >= {"summarization"}


def test_nothing_that_fits_is_an_error(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(bundle, "--category", "summarization") == 2
    assert "every prompt was skipped, the first because: The prompt has" in capsys.readouterr().err


def test_every_mode_continues_from_the_answers_of_plain_decoding(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = watch_streams(monkeypatch)
    report = report_of(capsys, bundle, "--prompts", prompts, "--modes", "lookup,lookup:max_draft=2", "--turns", "2")
    later = [prompt for prompt, _ in calls if len(prompt) == 3]
    assert len(later) == 3 and later[0] == later[1] == later[2]
    assert [message["role"] for message in later[0]] == ["user", "assistant", "user"]
    assert later[0][2]["content"] == "and again"
    assert sum(answer["turn"] == 1 for answer in report["answers"]) == 3


def test_sampled_answers_share_the_seed_of_their_prompt(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = watch_streams(monkeypatch)
    options = ("--modes", "lookup", "--temperature", "0.9", "--seed", "7", "--repeat", "2")
    report = report_of(capsys, bundle, "--prompts", prompts, *options)
    assert [options["seed"] for prompt, options in calls if not isinstance(prompt, str)] == [
        seed for seed in range(7, 13) for _ in range(2)
    ]
    if report["modes"][0]["exactness"] == "bitwise":
        assert report["summary"]["overall"]["lookup"]["identical"] == 6


def test_modes_get_their_options_and_engines_of_their_own(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = watch_streams(monkeypatch)
    modes = "lookup:max_draft=2:verification=block,auto,auto@distribution"
    report = report_of(capsys, bundle, "--prompts", prompts, "--modes", modes)
    assert {
        (options["speculation"], options.get("max_draft"), options.get("verification")) for _, options in calls
    } == {
        ("off", None, None),
        ("lookup", 2, "block"),
        ("auto", None, None),
    }
    assert report["engines"] == 3
    assert report["modes"][-1]["exactness"] == "distribution"
    assert report_of(capsys, bundle, "--prompts", prompts, "--modes", modes, "--shared-engine")["engines"] == 2


def test_another_bundle_is_decoded_plainly_beside(
    bundle: Path, prompts: Path, tiny_bundle: TinyBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_bundle(recipe="fp32", chat_template=CHAT_TEMPLATE)
    report = report_of(capsys, bundle, "--prompts", prompts, "--modes", "lookup", "--baseline", other)
    overall = report["summary"]["overall"]
    assert overall["baseline"]["identical"] is None
    assert overall["lookup"]["decode_speedup_over_baseline"]["ratio"] > 0
    assert overall["baseline"]["mean_accepted_length"] == 1
    assert report["baseline"]["target"]["recipe"] == "fp32"
    assert bench(bundle, "--prompts", prompts, "--baseline", tiny_bundle(recipe="fp32")) == 2
    assert "only one of bundle and baseline has a chat template" in capsys.readouterr().err


def test_a_log_is_replayed_in_its_order(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    entries = [
        {"prompt": "a a a"},
        {"prompt": "b b"},
        {"messages": [{"role": "user", "content": "c"}], "category": "x"},
    ]
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    calls = watch_streams(monkeypatch)
    report = report_of(capsys, bundle, "--replay", log, "--modes", "off")
    assert [prompt for prompt, _ in calls][1:] == ["a a a", "b b", ({"role": "user", "content": "c"},)]
    assert set(report["summary"]["categories"]) == {"recorded", "x"}


def test_what_was_recorded_is_asked_again_as_it_was(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = PromptRecorder(tmp_path / "log.jsonl")
    chat = [{"role": "user", "content": "c"}]
    recorder.record("a a a", {"temperature": 0.9, "seed": 3, "max_new_tokens": 4, "deadline": 2.0})
    recorder.record([5, 6, 7], {"speculation": "off"})
    recorder.record(chat, {"temperature": 0.9, "logit_bias": {5: 1.0}, "stop": "zz"})
    recorder.record("beyond the vocabulary", {"banned_token_ids": [10**6]})

    calls = watch_streams(monkeypatch)
    report = report_of(capsys, bundle, "--replay", recorder.path, "--modes", "lookup", "--seed", "20")
    run = {"max_new_tokens": 12, "temperature": 0.0}
    asked = [
        ("a a a", {**run, "temperature": 0.9, "seed": 3, "max_new_tokens": 4}),
        ((5, 6, 7), {**run, "seed": 21}),
        (tuple(chat), {**run, "temperature": 0.9, "seed": 22, "logit_bias": {5: 1.0}, "stop": "zz"}),
    ]
    answered = [(prompt, {**options, "speculation": None}) for prompt, options in calls[2:8]]
    assert answered == [(prompt, {**options, "speculation": None}) for prompt, options in asked for _ in range(2)]
    assert report["skipped"][0]["line"] == 4 and "banned_token_ids" in report["skipped"][0]["reason"]
    sampled = {answer["line"]: answer["statistics"]["seed"] for answer in report["answers"]}
    assert sampled == {1: 3, 2: None, 3: 22}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (LogitsError("all are NaN", row=0), 2, "failed (at row 0, all are NaN)"),
    ],
)
def test_a_run_that_ends_early_reports_what_it_has(
    error: BaseException,
    status: int,
    reason: str,
    bundle: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(call: int) -> None:
        if call == 2 + 2 + 2:  # two to warm up, two for the first prompt, and the second mode for the second prompt
            raise error

    watch_streams(monkeypatch, fail)
    assert bench(bundle, "--prompts", prompts, "--modes", "lookup", "--output", tmp_path / "report") == status
    assert f"Incomplete: {reason} after 2 of 6 answers" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["interruption"] == reason
    assert [answer["mode"] for answer in report["answers"]] == ["off", "lookup"]  # none without its partner
    assert "**Incomplete:**" in (tmp_path / "report" / "report.md").read_text()


def test_a_run_that_ends_before_its_first_answers_writes_nothing(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(call: int) -> None:
        raise KeyboardInterrupt

    watch_streams(monkeypatch, interrupt)
    assert bench(bundle, "--prompts", prompts, "--output", tmp_path / "report") == 130
    assert not (tmp_path / "report").exists()


def test_a_changed_text_is_called_a_fault(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Session.stream

    def changed(self: Session, prompt: Any, **options: Any) -> Iterator[Chunk]:
        if options["speculation"] == "off":
            return stream(self, prompt, **options)
        plain = list(stream(self, prompt, **{**options, "speculation": "off"}))
        return stream(self, prompt, **options, banned_token_ids=plain[0].token_ids)

    monkeypatch.setattr(Session, "stream", changed)
    status = bench(bundle, "--prompts", prompts, "--modes", "lookup", "--exactness", "bitwise")
    text = capsys.readouterr().out
    assert status == 1
    assert "0 of 3" in text and "Changed text, although bitwise: lookup" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "model"], "asks for the drafter 'model'.*no draft model"),
        (["--modes", "auto,fly"], "asks for the drafter 'fly', expected one of 'off', 'auto'"),
        (["--modes", "lookup:max_draft=x"], "expected a number"),
        (["--modes", "lookup:verification=typical"], "verification is 'typical'"),
        (["--repeat", "0"], "repeat is 0"),
        (["--turns", "0"], "turns is 0"),
        (["--temperature", "-1"], "temperature.*-1"),
        (["--category", "chess"], "no category 'chess'"),
        (["--context", "100000"], "context is 100000"),
        (["--exactness", "roughly"], "exactness is 'roughly'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--baseline", "nowhere.pair"], "nowhere.pair does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(bundle, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(f"edge-spec: error: .*{message}", captured.err)


def test_a_report_is_not_overwritten(
    bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("precious")
    assert bench(bundle, "--prompts", prompts, "--output", tmp_path) == 2
    assert "holds a report already; name another folder" in capsys.readouterr().err
    assert (tmp_path / "report.json").read_text() == "precious"
    assert bench(bundle, "--prompts", prompts, "--output", prompts / "below") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_bundle_that_does_not_fit_into_memory_is_not_loaded(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(bundle, "--memory-budget", "1MiB") == 2
    error = capsys.readouterr().err
    assert "does not fit its memory budget" in error and "Or compare fewer modes" in error


def test_missing_packages_are_named_before_anything_is_measured(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert bench(bundle, "--output", tmp_path / "report") == 2
    assert "'matplotlib', which is not installed: pip install 'edge-spec[bench]'" in capsys.readouterr().err


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        runner.write_whole(tmp_path / "report.md", "text")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    runner.write_whole(tmp_path / "report.md", b"text")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"text"]


def test_a_report_says_how_the_device_was_set_and_that_its_clocks_fell(
    bundle: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = iter((306_000_000, 1_020_000_000, 612_000_000))
    read: list[DeviceFacts] = []

    def facts() -> DeviceFacts:
        read.append(read_device_facts(jetson(tmp_path / "device", gpu_hz=next(clocks)), lambda: None))
        return read[-1]

    monkeypatch.setattr(runner, "read_device_facts", facts)
    assert bench(bundle, "--prompts", prompts, "--output", tmp_path / "report") == 0
    assert len(read) == 3  # before, after the first answers, at the end
    shown = " ".join(capsys.readouterr().out.split())
    assert "power mode MAXN_SUPER (2)" in shown and "GPU clock fell from 1020 to 612 MHz" in shown
    conditions = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))["conditions"]
    assert [conditions[when]["gpu_mhz"] for when in ("before", "begun", "after")] == [306, 1020, 612]
    assert "fell" in conditions["warnings"][0]
    assert "MAXN_SUPER" in (tmp_path / "report" / "report.md").read_text("utf-8")


def test_a_report_says_nothing_of_a_device_that_tells_nothing(
    bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "read_device_facts", DeviceFacts)
    assert bench(bundle, "--prompts", prompts) == 0
    shown = capsys.readouterr().out
    assert "device" not in shown and "Doubtful" not in shown
