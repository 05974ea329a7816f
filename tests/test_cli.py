"""The command line: help, examples, exit statuses, and what goes to which stream."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_spec import Chunk, Engine, cli
from edge_spec.bundle import (
    ArchitectureRecord,
    GraphRecord,
    Manifest,
    ModelRecord,
    QualityRecord,
    file_sha256,
    new_bundle,
)
from edge_spec.errors import BundleError, QualityError
from edge_spec.export.recipe import RECIPES
from gguf_files import model_metadata, tokenizer_metadata, write_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

METADATA = {**model_metadata(), **tokenizer_metadata(merges=("z z",))}

COMMANDS = ("export", "run", "bench", "calibrate", "inspect", "demo")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle as far as ``inspect`` looks: a true manifest over files that are no graphs."""
    facts = ArchitectureRecord("llama", 2, 64, 128, 4, 2, 16, 320, 512, 10000.0, False, True)
    quality = QualityRecord(tokens=160, mean_kl=0.0412, p95_kl=0.1234, top1_agreement=0.95)
    recipe = RECIPES["w8a8"].to_dict()
    graphs = (GraphRecord("target/model.onnx", tree=True),)
    target = ModelRecord("coder-1.5b.gguf", "ab" * 32, facts, recipe, "int8", graphs, quality)
    manifest = Manifest(
        created_by="edge-spec 0.1.0",
        device="cpu",
        vocab_size=300,
        context_length=512,
        eos_token_ids=(2, 7),
        bos_token_id=None,
        special_token_ids=(0, 1, 2, 7),
        named_tokens={"eos_token": "<|end|>"},
        default_sampling={"temperature": 0.7},
        target=target,
        draft=None,
        files={},
    )
    path = tmp_path / "coder.pair"
    with new_bundle(path) as (folder, seal):
        (folder / "target").mkdir()
        (folder / "target" / "model.onnx").write_bytes(bytes(3 << 20))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        seal(manifest)
    return path


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def edge_spec(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, then ``code``, which knows the ``status``."""
    program = f"import sys; from edge_spec.cli import main; status = main(sys.argv[1:]); {code or 'sys.exit(status)'}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_general_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys=capsys)
    assert all(re.search(rf"^ +{command} ", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_the_help_can_be_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(rf"^  .*\bedge-spec ({command}\b.*)$", help_of(command, capsys=capsys), re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.split(" | ")[0])
        assert callable(cli.build_parser().parse_args(words).command)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("edge-spec ")


def test_recipes_offered_are_those_that_exist() -> None:
    assert set(cli.RECIPES) == set(RECIPES)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["export", "--output", "x"],
        ["export", "--target", "x"],
        ["export", "--target", "x", "--output", "y", "--recipe", "int3"],
        ["run", "bundle"],
        ["run", "bundle", "prompt", "--max-new-tokens", "many"],
        ["inspect"],
    ],
)
def test_wrong_usage_exits_with_2_and_says_how_it_is_used(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: edge-spec" in capsys.readouterr().err


def test_options_that_were_not_given_are_left_to_the_engine() -> None:
    arguments = cli.build_parser().parse_args(
        ["run", "bundle", "hello", "--temperature", "0", "--stop", "a", "--stop", "b"]
    )
    given = cli._given(arguments, "temperature", "top_p", "seed", "stop")
    assert given == {"temperature": 0.0, "stop": ["a", "b"]}


@pytest.mark.parametrize("command", [["inspect"], ["run"], ["calibrate"]])
def test_missing_bundle_is_one_clear_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["hello"] if command == ["run"] else []
    assert cli.main([*command, str(tmp_path / "nothing"), *prompt]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"edge-spec: error: .*nothing does not exist; expected a pair bundle.*\n", captured.err)


@pytest.mark.parametrize(
    ("error", "status"), [(BundleError("cut short"), 2), (QualityError("too far"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_status_tells_what_went_wrong(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "_inspect", fail)
    assert cli.main(["inspect", "bundle"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert str(error) in captured.err


@pytest.mark.parametrize("package", ["gguf", "onnx_ir", "rich"])
def test_missing_package_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(cli, "_export", fail)
    assert cli.main(["export", "--target", "a", "--output", "b"]) == 2
    assert re.search(rf"'{package}'.*edge-spec\[export\]", capsys.readouterr().err)


def test_missing_module_of_our_own_is_not_blamed_on_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'edge_spec.nothing'", name="edge_spec.nothing")

    monkeypatch.setattr(cli, "_export", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["export", "--target", "a", "--output", "b"])


def test_reader_that_closes_the_pipe_early_is_no_error(bundle: Path) -> None:
    program = "import sys; from edge_spec.cli import main; sys.exit(main())"
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(bundle)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert process.stderr == ""
    assert process.returncode == 141


def test_inspect_shows_what_a_person_wants_to_know(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle)]) == 0
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
        "target/model.onnx, verifies chains and trees",
        "512 B per token",
        "KL to float32 0.0412 mean, 0.1234 p95 nats; same likeliest token 95.0% of 160",
        "ab" * 32,
        file_sha256(bundle / "target" / "model.onnx"),
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


def test_inspect_json_is_the_manifest(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((bundle / "manifest.json").read_text())


def test_inspect_needs_neither_numpy_nor_onnxruntime(bundle: Path) -> None:
    loaded = "print(sorted({'numpy', 'onnxruntime', 'tokenizers', 'jinja2', 'onnx', 'torch'} & sys.modules.keys()))"
    process = edge_spec("inspect", str(bundle), code=loaded)
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny random model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    model = write_model(folder / "tiny.gguf", metadata={**METADATA, "tokenizer.chat_template": CHAT_TEMPLATE})
    assert cli.main(["export", "--target", str(model), "--output", str(folder / "tiny.pair"), "--recipe", "fp32"]) == 0
    return folder / "tiny.pair"


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real bundle of a tiny random model without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    model = write_model(folder / "tiny.gguf", metadata=METADATA)
    assert cli.main(["export", "--target", str(model), "--output", str(folder / "tiny.pair"), "--recipe", "fp32"]) == 0
    return folder / "tiny.pair"


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
    seed = re.search(r"; seed (\d+)$", first.err.splitlines()[0])
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
    completion = answer(capsys, plain_pair, "hello", *words, "--ban-token", "5", "--ban-token", "6")
    assert given == [{**expected, "max_new_tokens": 24}]
    assert not {5, 6} & set(completion["token_ids"])


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "traversal"])
def test_run_takes_every_verification_rule(rule: str, plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, plain_pair, "aaaa", "--speculation", "off")
    assert answer(capsys, plain_pair, "aaaa", "--verification", rule)["token_ids"] == plain["token_ids"]


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


def test_calibrate_shows_what_rows_cost(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(plain_pair)]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +[\d.]+ +([\d.]+)  █+$", text, re.MULTILINE)
    assert [int(count) for count, _ in rows][:4] == [1, 2, 3, 4]
    ratios = [float(ratio) for _, ratio in rows]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios)
    assert "draft model: none" in text
    assert re.search(r"overhead: [\d.]+ ms a round", text)


def test_calibrate_shows_the_draft_model(tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_bundle(draft="same"))
    assert cli.main(["calibrate", path]) == 0
    text = capsys.readouterr().out
    assert re.search(r"draft model: milliseconds of a step: [\d.]+ at past 32; \d+% of a target's", text)
    assert re.search(r"catching up on tokens: [\d.]+ for 8, [\d.]+ for 64", text)
    assert re.search(r"guesses \d+% of \d+ tokens", text)


def test_calibrate_measures_again_only_when_told(plain_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(*options: str) -> dict[str, Any]:
        assert cli.main(["calibrate", str(plain_pair), "--json", *options]) == 0
        costs: dict[str, Any] = json.loads(capsys.readouterr().out)
        return costs

    first = measured()
    assert measured() == first
    assert measured("--threads", "1") != first
    again = measured("--fresh")
    assert again != first
    assert measured() == again
    assert len(again["verify_seconds"]["32"]) == len(again["rows"])
    assert again["draft_seconds"] is again["draft_agreement"] is None
    assert {"target", "draft", "overhead", "agreement"} <= again["calibration"].keys()


def test_calibrate_draws_an_image(plain_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["calibrate", str(plain_pair), "--plot", str(tmp_path / "costs.png")]) == 0
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["calibrate", str(plain_pair), "--plot", str(tmp_path / "costs.doc")]) == 2
    assert "expected a file that ends in .png" in capsys.readouterr().err


def test_calibrate_names_the_extra_for_images(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["calibrate", str(plain_pair), "--plot", "costs.png"]) == 2
    assert "pip install 'edge-spec[bench]'" in capsys.readouterr().err


def test_calibrate_works_without_the_package_for_bars(
    plain_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "edge_spec.progress_bars", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["calibrate", str(plain_pair), "--fresh"]) == 0
    assert capsys.readouterr().out.startswith("target: milliseconds")


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


def shell(command: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh in which ``edge_spec`` is the command line."""
    code = "import sys; from edge_spec.cli import main; sys.exit(main())"
    program = f"edge_spec() {{ '{sys.executable}' -c '{code}' \"$@\"; }}; {command}"
    return subprocess.run(
        ["sh", "-c", program, "sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_output_on_a_full_disk_is_one_message(bundle: Path) -> None:
    process = shell("edge_spec inspect $1 > /dev/full", bundle)
    assert process.returncode == 2
    assert process.stderr == "edge-spec: error: cannot read or write the standard streams: No space left on device\n"


def test_closed_streams_are_empty_ones(plain_pair: Path) -> None:
    assert shell("edge_spec run $1 hi --max-new-tokens 2 >&-", plain_pair).returncode == 0
    process = shell("edge_spec run $1 - --raw <&-", plain_pair)
    assert process.returncode == 2
    assert "The prompt is empty" in process.stderr


def test_a_name_that_the_terminal_cannot_write_is_escaped(bundle: Path) -> None:
    unwritable = bundle.rename(bundle.with_name("ü.pair"))
    process = shell("edge_spec inspect $1", unwritable, PYTHONIOENCODING="ascii")
    assert process.returncode == 0
    assert "\\xfc.pair: pair bundle for cpu" in process.stdout


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


def test_failed_export_writes_nothing_but_its_message(tmp_path: Path) -> None:
    process = shell("edge_spec export --target nowhere.gguf --output $1", tmp_path / "out.pair")
    assert re.fullmatch(r"edge-spec: error: no checkpoint at .*\n", process.stderr)
