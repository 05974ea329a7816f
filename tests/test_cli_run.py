"""``edge-spec run``: what it generates, from which options, and what it says of it."""

from __future__ import annotations

import functools
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_spec
from edge_spec import Chunk, Engine, cli


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert cli.main(["run", *map(str, arguments), "--max-new-tokens", "24", "--json"]) == 0
    completion: dict[str, Any] = json.loads(capsys.readouterr().out)
    return completion


def test_run_streams_text_to_stdout_and_statistics_to_stderr(
    chat_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = answer(capsys, chat_pair, "hello")["text"]
    assert cli.main(["run", str(chat_pair), "hello", "--max-new-tokens", "24"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{expected}\n"
    assert re.search(r"\d+ tokens at [\d.]+ tokens/s", captured.err)


def test_run_json_holds_the_completion(chat_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completion = answer(capsys, chat_pair, "hello")
    assert {"text", "token_ids", "finish_reason", "statistics"} <= completion.keys()
    assert completion["statistics"]["new_tokens"] == len(completion["token_ids"])
    assert completion["statistics"]["mean_accepted_length"] >= 1


def test_run_says_the_same_with_and_without_speculation(chat_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, lookup, short = (
        answer(capsys, chat_pair, "one two one two", "--speculation", *options)
        for options in (["off"], ["lookup"], ["lookup", "--max-draft", "1"])
    )
    assert off["token_ids"] == lookup["token_ids"] == short["token_ids"]


def test_run_applies_the_chat_template_unless_raw(chat_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prompt_tokens(*arguments: str) -> int:
        return int(answer(capsys, chat_pair, *arguments)["statistics"]["prompt_tokens"])

    assert prompt_tokens("hi", "--raw") == 2  # a token per byte
    assert prompt_tokens("hi") == len("<user>hi\n<assistant>")
    assert prompt_tokens("hi", "--system", "be brief") == len("<system>be brief\n<user>hi\n<assistant>")


def test_run_without_a_chat_template_continues_the_prompt(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, plain_pair, "hi")["statistics"]["prompt_tokens"] == 2


def test_run_reads_the_prompt_from_stdin(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert answer(capsys, plain_pair, "-")["statistics"]["prompt_tokens"] == len("two\nlines")


def test_run_with_a_seed_repeats_itself(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = (
        answer(capsys, plain_pair, "hi", "--temperature", "1.5", "--seed", seed)["token_ids"] for seed in "112"
    )
    assert first == second != other


def test_run_with_a_seed_says_the_same_whoever_drafts(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ("--temperature", "0.8", "--top-p", "0.95", "--repetition-penalty", "1.1", "--seed", "5")
    off, lookup, short = (
        answer(capsys, plain_pair, "one two one two", *sampling, "--speculation", *options)
        for options in (["off"], ["lookup"], ["lookup", "--max-draft", "1"])
    )
    if off["exactness"] != "bitwise":
        pytest.skip("THIS PROCESSOR PROMISES NO MORE THAN THE DISTRIBUTION for the tiny fp32 model")
    assert off["token_ids"] == lookup["token_ids"] == short["token_ids"]


def test_run_tells_the_seed_that_repeats_a_text(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(plain_pair), "hi", "--temperature", "1.5", "--max-new-tokens", "24"]
    assert cli.main(command) == 0
    first = capsys.readouterr()
    seed = re.search(r"; seed (\d+)$", first.err, re.MULTILINE)
    assert seed is not None
    assert cli.main([*command, "--seed", seed[1]]) == 0
    assert capsys.readouterr().out == first.out
    assert cli.main(["run", str(plain_pair), "hi", "--max-new-tokens", "2"]) == 0
    assert "seed" not in capsys.readouterr().err  # the likeliest text needs none


def test_run_json_holds_the_logprobs(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completion = answer(capsys, plain_pair, "hello", "--logprobs", "3")
    assert [entry["token_id"] for entry in completion["logprobs"]] == completion["token_ids"]
    for entry in completion["logprobs"]:
        assert [entry["token_id"], entry["logprob"]] == entry["top"][0]  # the likeliest was taken
        assert len(entry["top"]) == 3
    assert answer(capsys, plain_pair, "hello")["logprobs"] is None
    assert cli.main(["run", str(plain_pair), "hello", "--logprobs", "3"]) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_run_passes_every_option_on(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "banned_token_ids": [5, 6],
        "logprobs": 1,
        "speculation": "lookup",
        "max_draft": 2,
        "verification": "block",
    }
    given: list[dict[str, Any]] = []
    stream = Engine.stream

    def watched(self: Engine, prompt: str, **options: Any) -> Iterator[Chunk]:
        given.append(options)
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", watched)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in expected.items() if name != "banned_token_ids"]
    completion = answer(capsys, plain_pair, "hello", *words, "--ban-token", "5", "--ban-token", "6", "--no-tree")
    assert given == [{**expected, "tree": False, "max_new_tokens": 24}]
    assert not {5, 6} & set(completion["token_ids"])


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "traversal"])
def test_run_takes_every_verification_rule(rule: str, plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, plain_pair, "aaaa", "--speculation", "off")
    assert answer(capsys, plain_pair, "aaaa", "--verification", rule)["token_ids"] == plain["token_ids"]


def test_run_help_names_every_drafter(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with edge_spec.load(tiny_bundle(draft="same")) as engine:
        drafters = engine.drafters
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    named = re.search(r"who drafts: (.*) \(auto", capsys.readouterr().out)
    assert named is not None
    assert set(re.split(r", | or ", named[1])) == {*drafters, "grammar", "head"}


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "model", "lookup", "free", "composite"])
def test_run_takes_every_drafter(
    drafter: str, tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tiny_bundle(recipe="w8a8", draft="close")
    plain = answer(capsys, pair, "one two one two", "--speculation", "off")
    for options in ([], ["--no-tree"], ["--max-draft", "3"], ["--max-draft", "3", "--no-tree"]):
        drafted = answer(capsys, pair, "one two one two", "--speculation", drafter, *options)
        assert drafted["token_ids"] == plain["token_ids"]


def test_run_says_who_proposed_what_was_accepted(
    tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(tiny_bundle(draft="same")), "one two", "--max-new-tokens", "24"]
    for options in (["--speculation", "model"], ["--speculation", "composite"]):
        assert cli.main([*command, *options, "--max-draft", "4"]) == 0
        said = capsys.readouterr().err
        total = re.search(r"(\d+) of \d+ drafted tokens accepted", said)
        accepted = re.search(r"^accepted: (.*)$", said, re.MULTILINE)
        assert total is not None and accepted is not None
        counts = {name: int(count) for name, count in (entry.split() for entry in accepted[1].split(", "))}
        assert sum(counts.values()) == int(total[1]) > 0
        assert list(counts.values()) == sorted(counts.values(), reverse=True)
        assert counts["model"] > 0
    assert cli.main([*command, "--speculation", "off"]) == 0
    assert "accepted" not in capsys.readouterr().err


def test_run_shows_the_measurement_when_it_takes_place(
    plain_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    command = ["run", str(plain_pair), "hi", "--max-new-tokens", "2"]
    assert cli.main(command) == 0
    first = capsys.readouterr()
    assert re.match(r"target +━+ 100%", first.err)
    assert cli.main(command) == 0
    second = capsys.readouterr()
    assert "%" not in second.err
    assert first.out == second.out


def test_run_reports_the_level_of_exactness(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, plain_pair, "hi")["exactness"] in ("bitwise", "distribution")
    assert answer(capsys, plain_pair, "hi", "--exactness", "distribution")["exactness"] == "distribution"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "be brief"], "--system.*this bundle has none"),
        (["--temperature", "-1"], "temperature.*-1"),
        (["--speculation", "model"], "'model'.*no draft model"),
        (["--device", "cuda"], "exported for 'cpu'"),
        (["--context", "100000"], "context is 100000.*512"),
        (["--threads", "9" * 20], "threads is 9+, expected at most"),
        (["--verification", "typical"], "verification is 'typical', expected one of 'coupled'"),
        (["--exactness", "roughly"], "exactness is 'roughly', expected 'bitwise'"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0"),
        (["--presence-penalty", "3"], "presence_penalty is 3"),
        (["--ban-token", "999999"], "banned_token_ids holds token id 999999"),
    ],
)
def test_run_refuses_what_the_bundle_cannot_do(
    options: list[str], message: str, plain_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(plain_pair), "hi", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(rf"^edge-spec: error: .*{message}", captured.err)


def test_system_message_and_raw_exclude_each_other(chat_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(chat_pair), "hi", "--raw", "--system", "be brief"]) == 2
    assert "--raw leaves it out" in capsys.readouterr().err


def test_ctrl_c_ends_a_running_answer_without_a_traceback(plain_pair: Path) -> None:
    # A terminal so slow that the answer is still coming when the signal does.
    script = (
        "import builtins, sys, time; show = print\n"
        "builtins.print = lambda *text, **how: (show(*text, **how), time.sleep(0.05))\n"
        "from edge_spec.cli import main; sys.exit(main())"
    )
    options = ["run", str(plain_pair), "hi", "--max-new-tokens", "400", "--speculation", "off", "--threads", "1"]
    command = [sys.executable, "-c", script, *options]
    # A shell that starts us in the background has its children ignore the signal.
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeded) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
