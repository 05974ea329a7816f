"""Predictions for devices that are not here: what they are made of, and that they hold together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec import cli
from edge_spec.errors import EdgeSpecError, RequestError
from edge_spec.export.pair_recipe import PairRecipe
from edge_spec.export.planned_bundle import planned_manifest
from edge_spec.export.recipe import RECIPES
from edge_spec.export.shipped_recipes import find_pair_recipe
from edge_spec.manifest import Manifest
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.memory import plan_memory
from edge_spec.simulation.cost_law import Kernels, cost_curve
from edge_spec.simulation.device_class import DeviceClass, device_classes, find_device
from edge_spec.simulation.model_sizes import ModelSizes
from edge_spec.simulation.prediction import NOTICE, TASKS, Prediction, on_cuda, predict
from edge_spec.simulation.scripted_text import Scenario, ScriptedText
from edge_spec.simulation.virtual_decoding import VirtualRun, decode_virtually

KERNELS: tuple[Kernels, ...] = ("batched", "rows")
NEVER_RIGHT = Scenario(0.0, 0.0)


def pair(name: str = "qwen2.5-coder-7b") -> Manifest:
    return planned_manifest(find_pair_recipe(name), "cuda")


def curves(
    device: DeviceClass, kernels: Kernels, row_share: float, name: str = "qwen2.5-coder-7b"
) -> tuple[CostCurve, CostCurve]:
    manifest = pair(name)
    assert manifest.draft is not None
    return tuple(cost_curve(model, device, kernels, row_share) for model in (manifest.target, manifest.draft))  # type: ignore[return-value]


def decoded(
    device: DeviceClass, kernels: Kernels, row_share: float, scenario: Scenario, name: str = "qwen2.5-coder-7b"
) -> VirtualRun:
    target, draft = curves(device, kernels, row_share, name)
    text = ScriptedText.write(scenario, 96, 96 + 400, seed=1)
    return decode_virtually(target, draft, device.round_seconds, text, 63)


def share_of_plain_rounds(run: VirtualRun) -> float:
    return run.drafted[0] / run.rounds


# Devices


@pytest.mark.parametrize("device", device_classes().values(), ids=lambda device: device.name)
def test_published_speeds_leave_a_believable_share_of_the_memory_speed(device: DeviceClass) -> None:
    """If this fails, sizes, bits, bandwidth and speed of a figure do not belong together."""
    for speed in device.published:
        assert 0.6 < device.share_of(speed.sizes) < 1.0, speed.model
    assert 0.6 < device.memory_share < 1.0
    assert all("https://" in source for source in device.sources) and device.notes and device.assumptions


def test_a_step_takes_what_was_published_where_something_was() -> None:
    device, model = find_device("orin-nano"), pair("qwen2.5-7b").target
    published = device.published_speed(ModelSizes.of(model.architecture))
    assert published is not None and published.tokens_per_second == 21.75
    assert 1.0 / cost_curve(model, device, "batched", 0.1).at(1, 0) == pytest.approx(21.75)


def test_a_model_of_which_nothing_was_published_is_as_effective_as_others() -> None:
    device = find_device("orin-nano")
    sizes = ModelSizes.of(pair("qwen2.5-1.5b").target.architecture)
    assert device.published_speed(sizes) is None
    assert device.share_of(sizes) == device.memory_share


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(RequestError, match="'tx2'.*orin-nano, orin-nx, agx-orin, thor"):
        find_device("tx2")


# Costs


@pytest.mark.parametrize("kernels", KERNELS)
@given(factor=st.floats(1.0, 20.0), rows=st.integers(1, 64), past=st.integers(0, 8192))
@settings(max_examples=40, deadline=None)
def test_a_faster_memory_makes_no_call_slower(kernels: Kernels, factor: float, rows: int, past: int) -> None:
    device = replace(find_device("agx-orin"), published=())
    faster = replace(device, bytes_per_second=factor * device.bytes_per_second)
    for slow, fast in zip(curves(device, kernels, 0.1), curves(faster, kernels, 0.1), strict=True):
        assert fast.at(rows, past) <= slow.at(rows, past)


@pytest.mark.parametrize("kernels", KERNELS)
@given(rows=st.integers(1, 63), past=st.integers(0, 8191), more=st.integers(1, 1000), share=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_no_call_gets_cheaper_with_more_rows_or_more_text(
    kernels: Kernels, rows: int, past: int, more: int, share: float
) -> None:
    target, _ = curves(find_device("thor"), kernels, share)
    assert target.at(rows, past) < target.at(rows, past + more)
    assert target.at(rows, past) <= target.at(rows + 1, past)


@given(length=st.integers(64, 2048), more=st.integers(1, 2048))
@settings(max_examples=10, deadline=None)
def test_plain_decoding_behind_a_longer_text_is_never_faster(length: int, more: int) -> None:
    target, draft = curves(find_device("orin-nano"), "batched", 0.1)

    def plain_seconds(prompt: int) -> float:
        text = ScriptedText.write(NEVER_RIGHT, prompt, prompt + 8, seed=0)
        return decode_virtually(target, draft, 0.0, text, 63).plain_seconds

    assert plain_seconds(length) < plain_seconds(length + more)


def test_rows_without_a_kernel_for_them_cost_a_pass_each_until_widening_is_cheaper() -> None:
    device = find_device("orin-nano")
    rows, _ = curves(device, "rows", 0.1)
    batched, _ = curves(device, "batched", 0.1)
    reading = (rows.at(2, 0) - rows.at(1, 0)) / rows.at(1, 0)
    assert reading > 0.8
    assert rows.at(5, 0) - rows.at(1, 0) == pytest.approx(4 * (rows.at(2, 0) - rows.at(1, 0)))
    assert rows.at(64, 0) < 12 * rows.at(1, 0)
    assert batched.at(1, 0) == rows.at(1, 0)
    assert all(batched.at(count, 0) < rows.at(count, 0) for count in range(2, 17))


# Decoding in virtual time


@pytest.mark.parametrize("device", device_classes().values(), ids=lambda device: device.name)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_that_is_never_right_is_given_up_and_costs_next_to_nothing(
    device: DeviceClass, kernels: Kernels
) -> None:
    for row_share in (device.cheap_row, device.dear_row):
        for name in ("qwen2.5-coder-7b", "qwen2.5-coder-1.5b"):
            run = decoded(device, kernels, row_share, NEVER_RIGHT, name)
            assert run.speedup > 0.98
            assert share_of_plain_rounds(run) > 0.8


def test_without_a_kernel_for_several_rows_little_is_drafted_and_nothing_is_lost() -> None:
    """As with the wheels for JetPack 6."""
    for device in device_classes().values():
        for acceptance in (0.5, 0.7):
            run = decoded(device, "rows", device.cheap_row, Scenario(acceptance, 0.0))
            assert share_of_plain_rounds(run) > 0.95, device.name
            assert run.speedup > 0.98
        batched = decoded(device, "batched", device.cheap_row, Scenario(0.7, 0.0))
        assert share_of_plain_rounds(batched) < 0.2 and batched.speedup > 1.5


def test_a_draft_that_is_always_right_is_trusted_with_long_chains() -> None:
    run = decoded(find_device("orin-nano"), "batched", 0.06, Scenario(1.0, 0.0))
    assert run.speedup > 3.0
    assert run.drafted.most_common(1)[0][0] > 6


def test_passages_that_are_copied_are_drafted_without_a_model() -> None:
    device = find_device("thor")
    target, _ = curves(device, "batched", device.cheap_row)

    def without_model(copied: float) -> float:
        text = ScriptedText.write(Scenario(0.0, copied), 512, 512 + 300, seed=2)
        return decode_virtually(target, None, device.round_seconds, text, 63).speedup

    assert without_model(0.8) > 1.5 > without_model(0.0) > 0.98


def test_the_clock_adds_up_to_the_costs_of_the_calls() -> None:
    """Without a draft and anything to copy, a run is plain steps and nothing else."""
    target = CostCurve((1, 64), (0.01, 1.0), (1e-5, 1e-5))
    text = ScriptedText.write(NEVER_RIGHT, 20, 60, seed=3)
    run = decode_virtually(target, None, 0.002, text, 0)
    assert run.rounds == run.tokens == 39 and run.drafted == Counter({0: 39})
    assert run.seconds == pytest.approx(run.plain_seconds)
    assert run.plain_seconds == pytest.approx(sum(0.012 + 1e-5 * past for past in range(20, 59)))


@given(seed=st.integers(0, 2**31), acceptance=st.floats(0.0, 1.0), copied=st.floats(0.0, 0.9))
@settings(max_examples=15, deadline=None)
def test_every_text_is_decoded_to_its_end(seed: int, acceptance: float, copied: float) -> None:
    target, draft = curves(find_device("agx-orin"), "batched", 0.1)
    text = ScriptedText.write(Scenario(acceptance, copied), 64, 160, seed)
    run = decode_virtually(target, draft, 0.0005, text, 63)
    assert run.tokens == 95 == run.rounds + run.accepted
    assert run.seconds > 0.0


# Texts


@given(seed=st.integers(0, 2**31), acceptance=st.floats(0.0, 1.0), copied=st.floats(0.0, 0.9))
@settings(max_examples=25, deadline=None)
def test_the_same_seed_gives_the_same_text(seed: int, acceptance: float, copied: float) -> None:
    texts = [ScriptedText.write(Scenario(acceptance, copied), 50, 150, seed) for _ in range(2)]
    assert texts[0].tokens == texts[1].tokens and texts[0].agreement == texts[1].agreement
    assert (texts[0].right == texts[1].right).all() and (texts[0].chances == texts[1].chances).all()


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_the_draft_is_right_as_often_as_was_asked(acceptance: float) -> None:
    text = ScriptedText.write(Scenario(acceptance, 0.0), 10, 8000, seed=4)
    assert text.right[10:].mean() == pytest.approx(acceptance, abs=0.03)
    assert all((text.drafted(at) == text.tokens[at]) == text.right[at] for at in range(100))


@pytest.mark.parametrize("copied", [0.0, 0.4, 0.8])
def test_as_much_is_copied_from_the_prompt_as_was_asked(copied: float) -> None:
    prompt = 400
    text = ScriptedText.write(Scenario(0.5, copied), prompt, prompt + 8000, seed=5)
    known = {text.tokens[at : at + 4] for at in range(prompt - 3)}
    found = sum(text.tokens[at : at + 4] in known for at in range(prompt, prompt + 7997))
    assert found / 7997 == pytest.approx(0.87 * copied, abs=0.06)  # the last three of a passage begin no such four


# Predictions


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(pair(), find_device("orin-nano"), tokens=128)


def test_a_prediction_is_the_same_every_time(prediction: Prediction) -> None:
    assert predict(pair(), find_device("orin-nano"), tokens=128).to_json() == prediction.to_json()
    assert predict(pair(), find_device("orin-nano"), tokens=128, seed=9).tasks != prediction.tasks


def test_no_task_is_predicted_to_be_slower_than_plain_decoding(prediction: Prediction) -> None:
    assert [task.task for task in prediction.tasks] == [task.name for task in TASKS]
    for task in prediction.tasks:
        assert min(task.low.speedup, task.high.speedup) > 0.98
        for outlook in (task.low, task.high):
            assert sum(outlook.drafted.values()) == pytest.approx(1.0)
            assert outlook.mean_accepted_length >= 1.0
    assert all(task.low.speedup < task.high.speedup for task in prediction.tasks[:-1])
    assert max(prediction.tasks[-1].low.speedup, prediction.tasks[-1].high.speedup) < 1.01


def test_the_plan_is_that_of_the_memory_the_device_has(prediction: Prediction) -> None:
    assert prediction.plan.fits and prediction.plan.budget_bytes == int(0.8 * (7 << 30))
    assert prediction.draft_share is not None


def test_without_room_for_the_draft_there_is_none_in_the_prediction() -> None:
    device = find_device("orin-nano")
    least = plan_memory(replace(pair(), draft=None), None).total_bytes
    small = replace(device, memory_bytes=device.system_bytes + int(least / 0.8) + (1 << 20))
    prediction = predict(pair(), small, tokens=16)
    assert prediction.plan.fits and not prediction.plan.configuration.draft
    assert prediction.draft_share is None and prediction.tasks


def test_a_pair_that_does_not_fit_gets_no_speedup() -> None:
    tiny = replace(find_device("orin-nano"), memory_bytes=3 << 30)
    prediction = predict(pair(), tiny)
    assert not prediction.plan.fits and prediction.tasks == ()


def test_a_pair_for_the_cpu_is_taken_as_if_exported_for_cuda() -> None:
    manifest = planned_manifest(find_pair_recipe("qwen2.5-1.5b"))
    assert manifest.device == "cpu" and manifest.target.recipe["name"] == "w8a8"
    exported = on_cuda(manifest)
    assert exported.device == "cuda" and exported.target.recipe == RECIPES["int4"].to_dict()
    assert exported.draft is not None and exported.draft.recipe["block_size"] == 32
    assert on_cuda(exported) is exported


@pytest.mark.parametrize("beside", [False, True])
def test_a_draft_for_the_cpu_is_taken_as_if_exported_for_cuda(beside: bool) -> None:
    whole, on_cpu = pair("qwen2.5-1.5b"), planned_manifest(find_pair_recipe("qwen2.5-1.5b")).draft
    prediction = predict(
        replace(whole, draft=whole.draft if beside else None, cpu_draft=on_cpu), find_device("thor"), tokens=8
    )
    assert prediction.plan.configuration.draft_device == "cuda" and prediction.plan.on_cpu is None
    assert prediction == predict(whole, find_device("thor"), tokens=8)


def test_a_model_of_unknown_sizes_is_refused() -> None:
    with pytest.raises(EdgeSpecError, match="sizes of 'somebody/something' are not known"):
        planned_manifest(PairRecipe("somebody/something", None, None, None), "cuda")


# Against a run that was measured (docs/benchmarks.md): the Qwen2.5-Coder pair on two cores with AVX2, whose calls cost
# 1.7 plain steps for 8 rows and 3.0 for 16, and whose draft a fifth of one.
AVX2 = CostCurve((1, 2, 4, 8, 16, 32, 64), (0.1, 0.1, 0.116, 0.17, 0.3, 0.52, 1.0), (0.0,) * 7)
AVX2_DRAFT = CostCurve((1, 2, 4, 8, 64), (0.02, 0.024, 0.03, 0.045, 0.25), (0.0,) * 5)
MEASURED = {
    "open questions": (1.03, 1.56),
    "conversation, mathematics": (1.32, 1.75),
    "summaries, retrieved texts": (1.25, 3.83),
}


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_ranges_meet_what_was_measured_on_another_machine(name: str) -> None:
    task = next(task for task in TASKS if task.name == name)

    def speedup(scenario: Scenario) -> float:
        texts = [ScriptedText.write(scenario, task.prompt, task.prompt + 128, seed) for seed in range(6)]
        runs = [decode_virtually(AVX2, AVX2_DRAFT, 0.001, text, 63) for text in texts]
        return sum(run.plain_seconds for run in runs) / sum(run.seconds for run in runs)

    low, high = speedup(task.hard), speedup(task.easy)
    assert low < high
    assert low < MEASURED[name][1] and high > MEASURED[name][0]


# The command


def test_the_command_says_in_every_output_that_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "qwen2.5-coder-7b", "--on", "orin-nano", "--on", "thor", "--tokens", "24"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("predicted, not measured") == 2 and NOTICE in shown
    assert "https://" in shown and "Assumed:" in shown and "21.75 published" in shown
    assert cli.main([*words, "--json", "--kernels", "rows"]) == 0
    bodies = json.loads(capsys.readouterr().out)
    assert [body["device"]["name"] for body in bodies] == ["orin-nano", "thor"]
    for body in bodies:
        assert body["prediction"] == NOTICE and body["kernels"] == "rows" and body["plan"]["fits"]
        assert body["device"]["sources"] and body["device"]["assumptions"]


def test_the_command_takes_a_bundle(tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny_bundle(recipe="w8a8", draft="close")
    assert cli.main(["simulate", str(bundle), "--on", "orin-nx", "--tokens", "8", "--json"]) == 0
    (body,) = json.loads(capsys.readouterr().out)
    assert body["plan"]["configuration"]["draft"] and body["published_tokens_per_second"] is None


def test_the_command_fails_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(find_device("orin-nano"), memory_bytes=2 << 30)
    monkeypatch.setattr("edge_spec.simulation.device_class.find_device", lambda name: tiny)
    assert cli.main(["simulate", "qwen2.5-coder-7b", "--on", "orin-nano"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown and "TASK" not in shown and NOTICE in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen2.5-7b", "--on", "tx2"], "no device class 'tx2'"),
        (["qwen2.5-7b", "--tokens", "1"], "tokens is 1"),
        (["qwen2.5-7b", "--context", "1"], "context is 1"),
        (["qwen2.5-7b", "--context", "2"], "context is 2, expected 3"),
        (["qwen2.5-7b", "--seed", "-1"], "seed is -1"),
        (["no-such-pair"], "no pair recipe 'no-such-pair'"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *words]) == 2
    assert said in capsys.readouterr().err
