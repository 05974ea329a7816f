"""The command line as a whole: help, examples, exit statuses, and what becomes of the standard streams."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edge_spec import __version__, cli
from edge_spec.cli import export, inspect
from edge_spec.cli.command import given
from edge_spec.errors import BundleError, QualityError

COMMANDS = ("export", "run", "chat", "bench", "calibrate", "simulate", "inspect", "demo")


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


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


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["export", "--output", "x"],
        ["export", "--target", "x"],
        ["export", "--target", "x", "--output", "y", "--draft-recipe", "int3"],
        ["export", "--target", "x", "--output", "y", "--draft-recipe", "int4"],
        ["export", "--target", "x", "--output", "y", "--draft-via", "native"],
        ["export", "--list", "--target", "x"],
        ["export", "--list", "--draft-device", "both"],
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


def test_it_runs_as_a_module_too() -> None:
    ran = subprocess.run([sys.executable, "-m", "edge_spec", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"edge-spec {__version__}\n"


def test_options_that_were_not_given_are_left_to_the_engine() -> None:
    arguments = cli.build_parser().parse_args(
        ["run", "bundle", "hello", "--temperature", "0", "--stop", "a", "--stop", "b"]
    )
    options = given(arguments, "temperature", "top_p", "seed", "stop")
    assert options == {"temperature": 0.0, "stop": ["a", "b"]}


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

    monkeypatch.setattr(inspect, "_inspect", fail)
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

    monkeypatch.setattr(export, "_export", fail)
    assert cli.main(["export", "--target", "a", "--output", "b"]) == 2
    assert re.search(rf"'{package}'.*edge-spec\[export\]", capsys.readouterr().err)


def test_missing_module_of_our_own_is_not_blamed_on_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'edge_spec.nothing'", name="edge_spec.nothing")

    monkeypatch.setattr(export, "_export", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["export", "--target", "a", "--output", "b"])


def test_reader_that_closes_the_pipe_early_is_no_error(described_bundle: Path) -> None:
    program = "import sys; from edge_spec.cli import main; sys.exit(main())"
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(described_bundle)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert process.stderr == ""
    assert process.returncode == 141


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


def test_output_on_a_full_disk_is_one_message(described_bundle: Path) -> None:
    process = shell("edge_spec inspect $1 > /dev/full", described_bundle)
    assert process.returncode == 2
    assert process.stderr == "edge-spec: error: cannot read or write the standard streams: No space left on device\n"


def test_closed_streams_are_empty_ones(plain_pair: Path) -> None:
    assert shell("edge_spec run $1 hi --max-new-tokens 2 >&-", plain_pair).returncode == 0
    process = shell("edge_spec run $1 - --raw <&-", plain_pair)
    assert process.returncode == 2
    assert "The prompt is empty" in process.stderr


def test_a_name_that_the_terminal_cannot_write_is_escaped(described_bundle: Path) -> None:
    unwritable = described_bundle.rename(described_bundle.with_name("ü.pair"))
    process = shell("edge_spec inspect $1", unwritable, PYTHONIOENCODING="ascii")
    assert process.returncode == 0
    assert "\\xfc.pair: pair bundle for cpu" in process.stdout


def test_failed_export_writes_nothing_but_its_message(tmp_path: Path) -> None:
    process = shell("edge_spec export --target nowhere.gguf --output $1", tmp_path / "out.pair")
    assert re.fullmatch(r"edge-spec: error: no checkpoint at .*\n", process.stderr)
