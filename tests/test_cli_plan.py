"""``edge-spec plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edge_spec.cli import main
from edge_spec.runtime.memory import MOST_CONVERSATIONS


def test_the_json_of_a_plan_adds_up(described_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(described_bundle), "--budget", "1GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["total_bytes"] == sum(item["bytes"] for item in plan["items"]) <= plan["budget_bytes"] == 1 << 30
    assert {item["name"] for item in plan["items"]} >= {"libraries", "tokenizer", "target weights", "target KV cache"}
    assert plan["configuration"]["conversations"] == 1
    assert plan["given_up"] == []
    assert plan["next_larger"] is None


def test_what_does_not_fit_is_shown_with_exit_status_1(
    described_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(described_bundle), "--budget", "1MiB"]) == 1
    shown = capsys.readouterr()
    assert "do not fit a budget of 1.0 MiB" in shown.out
    assert "target weights" in shown.out
    assert shown.err == ""


def test_budgets_are_compared(described_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--budget", "1GiB", "--budget", "2GiB"]
    assert main(["plan", str(described_bundle), *budgets, "--json"]) == 0
    assert [plan["budget_bytes"] for plan in json.loads(capsys.readouterr().out)] == [1 << 30, 2 << 30]
    assert main(["plan", str(described_bundle), *budgets]) == 0
    shown = capsys.readouterr().out
    assert "of a budget of 1.00 GiB" in shown
    assert "of a budget of 2.00 GiB" in shown


def test_without_a_budget_a_share_of_what_is_free_is_planned_with(
    described_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.runtime.free_memory.available_memory", lambda: 1000 << 20)
    assert main(["plan", str(described_bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == 800 << 20


@pytest.mark.parametrize(
    "options", [["--budget", "plenty"], ["--context", "1"], ["--conversations", "0"], ["--conversations", "10" * 20]]
)
def test_bad_options_are_one_message(
    described_bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["plan", str(described_bundle), *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "expected" in shown.err
    assert shown.err.startswith("edge-spec: error: ")


def test_many_conversations_are_planned_at_once(described_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "1GiB", "--conversations", str(MOST_CONVERSATIONS), "--json"]
    assert main(["plan", str(described_bundle), *options]) == 0
    assert 1 < json.loads(capsys.readouterr().out)["configuration"]["conversations"] < MOST_CONVERSATIONS


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "edge-spec plan coder.pair --budget 2GiB" in capsys.readouterr().out


@pytest.fixture
def cuda_bundle(described_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The described bundle for CUDA, on a machine without a GPU."""
    from edge_spec.bundle import MANIFEST, read_manifest

    monkeypatch.setattr("edge_spec.runtime.device_memory.find_gpu", lambda: None)
    manifest = read_manifest(described_bundle)
    graphs = (replace(manifest.target.graphs[0], kv="float16"),)
    on_gpu = replace(manifest, device="cuda", target=replace(manifest.target, graphs=graphs))
    (described_bundle / MANIFEST).write_text(json.dumps(on_gpu.to_json()))
    return described_bundle


def test_a_bundle_for_cuda_is_planned_without_a_gpu_for_one_that_shares_the_memory(
    cuda_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(cuda_bundle)]) == 0
    shown = capsys.readouterr().out
    assert "no limit was given" in shown  # what is free here is another machine's
    assert "shares the machine's memory" in shown
    assert "none here" in shown
    assert main(["plan", str(cuda_bundle), "--budget", "6GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["pools"], plan["budget_bytes"]) == ("unified", 6 << 30)
    assert plan["total_bytes"] == sum(item["bytes"] for item in plan["items"])


def test_a_share_of_a_gpu_that_is_not_here_is_refused(cuda_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ([], ["--gpu", "discrete"]):
        assert main(["plan", str(cuda_bundle), "--budget", "4GiB", "--budget", "50%", *kind]) == 2
        assert "--budget is '50%', a share of what is free, but that GPU is not here" in capsys.readouterr().err


def test_a_gpu_that_is_here_says_what_is_free(
    cuda_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_spec.runtime.device_memory import GpuMemory

    card = GpuMemory("NVIDIA Fake", False, 8 << 30, lambda: 5 << 30)
    monkeypatch.setattr("edge_spec.runtime.device_memory.find_gpu", lambda: card)
    monkeypatch.setattr("edge_spec.runtime.free_memory.available_memory", lambda: 10 << 30)
    assert main(["plan", str(cuda_bundle), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["pools"], plan["budget_bytes"], plan["host_budget_bytes"]) == ("discrete", 4 << 30, 8 << 30)
    assert main(["plan", str(cuda_bundle)]) == 0
    assert "that GPU: NVIDIA Fake" in capsys.readouterr().out
    assert main(["plan", str(cuda_bundle), "--gpu", "unified", "--json"]) == 0  # a Jetson, from a workstation
    plan = json.loads(capsys.readouterr().out)
    assert (plan["pools"], plan["budget_bytes"]) == ("unified", None)


def test_a_kind_of_gpu_for_a_bundle_for_the_cpu_is_refused(
    described_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(described_bundle), "--gpu", "discrete"]) == 2
    assert "is for the CPU" in capsys.readouterr().err
