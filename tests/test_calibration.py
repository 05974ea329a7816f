"""Calibration: known costs are found again, useless calls are not measured, and once is enough for a machine."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from device_trees import H200, FakeNvml, jetson, write_tree
from edge_spec.bundle import open_bundle
from edge_spec.errors import RequestError
from edge_spec.runtime.calibration import TEXT, Calibration, calibrate
from edge_spec.runtime.calibration_cache import default_folder, load_or_calibrate, machine
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.model import Model
from edge_spec.runtime.tokenizer import TextTokenizer
from tiny_models import TOKENS

VOCAB = 16
PROMPT = (1, 2, 3, 4, 5)

Bundles = Callable[..., Path]
Seconds = Callable[[int, int], float]


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeCache:
    def __init__(self, capacity: int) -> None:
        self.length = 0
        self.capacity = capacity

    def fill(self, length: int) -> None:
        assert self.length <= length <= self.capacity
        self.length = length

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length


class FakeModel:
    """A model that says of every token that the next one follows, and whose calls take known times."""

    chain_lengths: tuple[int, ...] = ()

    def __init__(self, clock: Clock, seconds: Seconds, context: int = 4096, step: int = 1, sure: float = 5.0) -> None:
        self.context = context
        self.cache = FakeCache(context)
        self.calls: list[tuple[int, int]] = []
        self._clock, self._seconds, self._next, self._sure = clock, seconds, step, sure

    def forward(self, token_ids: Any, logit_rows: Any) -> np.ndarray:
        rows, past = len(token_ids), self.cache.length
        assert 0 < rows <= self.context - past
        self.calls.append((rows, past))
        self.cache.length += rows
        self._clock.now += self._seconds(rows, past)
        logits = np.zeros((len(logit_rows), VOCAB), np.float32)
        for index, row in enumerate(logit_rows):
            logits[index, (token_ids[row] + self._next) % VOCAB] = self._sure
        return logits

    def prefill(self, token_ids: Any) -> None:
        self.forward(token_ids, ())


def cpu(rows: int, past: int) -> float:
    """A 1.5B target on two cores: a step in the costs after each block of rows, and attention."""
    return {1: 0.095, 2: 0.095, 3: 0.1, 4: 0.1}.get(rows, 0.1 + 0.016 * (rows - 4)) + 1e-5 * past * (1 + rows / 4)


def flat(rows: int, past: int) -> float:
    """A machine that computes 32 rows nearly as quickly as one."""
    return 0.02 + 0.0002 * rows


def small(rows: int, past: int) -> float:
    return 0.03 + 0.006 * (rows - 1) + 2e-6 * past


def measure(target: Any, draft: Any, clock: Clock, progress: Any = None) -> Calibration:
    result = calibrate(target, draft, PROMPT, progress, clock)
    assert target.cache.length == 0
    assert draft is None or draft.cache.length == 0
    return result


@pytest.mark.parametrize("truth", [cpu, flat])
def test_known_costs_are_found_again(truth: Seconds) -> None:
    clock = Clock()
    costs = measure(FakeModel(clock, truth), FakeModel(clock, small), clock).costs
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16):
        for past in (30, 1024, 4000):
            assert costs.verify(rows, past) == pytest.approx(truth(rows, past), rel=0.01)
    for rows in (1, 2, 4, 8, 30, 64):
        assert costs.draft(30, rows) == pytest.approx(small(rows, 30), rel=0.01)
    assert costs.draft(2000) == pytest.approx(small(1, 2000), rel=0.01)


def test_costs_are_found_on_a_machine_that_slows_down_and_is_shared() -> None:
    off = []
    for seed in range(240):
        dice, clock = random.Random(seed), Clock()

        def truth(rows: int, past: int, dice: random.Random = dice, clock: Clock = clock) -> float:
            disturbed = 3.0 if dice.random() < 0.1 else 1.0
            return cpu(rows, past) * disturbed * (1.0 + clock.now / 20.0) * math.exp(dice.gauss(0.0, 0.03))

        costs = measure(FakeModel(clock, truth), None, clock).costs
        for rows in range(2, 9):
            ratio = costs.verify(rows, 30) / costs.verify(1, 30)
            off.append(abs(ratio / (cpu(rows, 30) / cpu(1, 30)) - 1.0))
    # Where every call of a row count was disturbed, and those of the next wider ones, nothing can be known.
    assert np.mean(np.array(off) < 0.15) > 0.93
    assert np.median(off) < 0.04


def test_a_token_that_is_read_from_the_disk_the_first_time_does_not_distort_the_costs() -> None:
    clock, seen = Clock(), set(PROMPT)

    class Mapped(FakeModel):
        def forward(self, token_ids: Any, logit_rows: Any) -> np.ndarray:
            clock.now += 2 * cpu(1, 0) * len(set(token_ids) - seen)
            seen.update(token_ids)
            return super().forward(token_ids, logit_rows)

    costs = measure(Mapped(clock, cpu), None, clock).costs
    for rows in range(1, 9):
        assert costs.verify(rows, 30) == pytest.approx(cpu(rows, 30), rel=0.02)


def test_rows_that_cost_too_much_are_not_measured() -> None:
    clock = Clock()
    dear, cheap = FakeModel(clock, lambda rows, past: 0.01 + 0.09 * rows), FakeModel(clock, flat)
    assert max(measure(dear, None, clock).costs.target.curve.rows) == 4
    assert max(rows for rows, _ in dear.calls if rows != len(PROMPT)) <= 4
    assert max(measure(cheap, None, clock).costs.target.curve.rows) == 32


def test_one_disturbed_call_does_not_end_the_measurement() -> None:
    clock = Clock()
    calls = iter(range(10**6))
    target = FakeModel(clock, lambda rows, past: cpu(rows, past) * (50.0 if next(calls) == 4 else 1.0))
    costs = measure(target, None, clock).costs
    assert target.calls[4] == target.calls[5]
    assert costs.verify(12, 30) == pytest.approx(cpu(12, 30), rel=0.02)


def test_the_time_it_takes_is_bounded() -> None:
    clock = Clock()
    measure(FakeModel(clock, cpu), FakeModel(clock, small), clock)
    assert clock.now < 7.0
    clock = Clock()
    tiny = FakeModel(clock, lambda rows, past: 2e-4)
    measure(tiny, FakeModel(clock, lambda rows, past: 1e-4), clock)
    assert clock.now < 0.05
    assert len(tiny.calls) > 60  # so more of them are taken


@pytest.mark.parametrize("context", [2, 3, 9, 40, 140, 700])
def test_small_contexts_are_measured_as_far_as_they_reach(context: int) -> None:
    clock = Clock()
    result = measure(FakeModel(clock, cpu, context), FakeModel(clock, small, context), clock)
    assert result.costs.verify(1, 1) == pytest.approx(cpu(1, 1), rel=0.03)
    assert result.costs.draft(1) == pytest.approx(small(1, 1), rel=0.03)


def test_a_draft_with_less_context_than_the_target_is_measured() -> None:
    clock = Clock()
    costs = measure(FakeModel(clock, cpu), FakeModel(clock, small, context=8), clock).costs
    assert costs.draft(1) == pytest.approx(small(1, 1), rel=0.01)


@pytest.mark.parametrize(("step", "agrees"), [(1, True), (3, False)])
def test_the_draft_is_compared_with_what_the_target_wrote(step: int, agrees: bool) -> None:
    clock = Clock()
    draft = FakeModel(clock, small, step=step, sure=4.0)
    pairs = measure(FakeModel(clock, cpu), draft, clock).agreement
    assert len(pairs) >= 16
    assert {agreed for _, agreed in pairs} == {agrees}
    expected = math.exp(4.0) / (math.exp(4.0) + VOCAB - 1)
    assert [probability for probability, _ in pairs] == pytest.approx([expected] * len(pairs))


def test_a_draft_that_breaks_down_is_never_right() -> None:
    clock = Clock()
    pairs = measure(FakeModel(clock, cpu), FakeModel(clock, small, sure=math.nan), clock).agreement
    assert set(pairs) == {(0.0, False)}


def test_progress_rises_to_the_end_of_each_stage() -> None:
    clock = Clock()
    seen: dict[str, list[float]] = {}
    models = FakeModel(clock, cpu), FakeModel(clock, small)
    measure(*models, clock, lambda stage, done: seen.setdefault(stage, []).append(done))
    assert list(seen) == ["target", "draft model"]
    for shares in seen.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


CALIBRATION = Calibration(Costs(CallCosts(CostCurve((1, 2), (0.1, 0.1), (0.0, 0.0))), None, 1e-3), ((0.5, True),))


class Measurement:
    """Measures for nothing and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Calibration:
        self.count += 1
        return CALIBRATION


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    measurement = Measurement()
    folder = tmp_path / "new" / "folder"
    results = [load_or_calibrate({"threads": 1}, measurement, folder) for _ in range(3)]
    assert measurement.count == 1
    assert {json.dumps(result.to_dict()) for result in results} == {json.dumps(CALIBRATION.to_dict())}
    assert len(list(folder.iterdir())) == 1  # and nothing half written
    load_or_calibrate({"threads": 2}, measurement, folder)
    assert measurement.count == 2
    load_or_calibrate({"threads": 2}, measurement, folder, fresh=True)
    assert measurement.count == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "bytes", "deep", "long", "negative", "folder", "pairs"])
def test_a_damaged_cache_is_measured_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "edge_spec")
    measurement = Measurement()
    load_or_calibrate({"threads": 1}, measurement, tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    body = json.loads(good)
    contents = {
        "cut": good[:-20],
        "empty": "",
        "foreign": json.dumps({**body, "key": {"threads": 9}}),
        "bytes": "\udcff\udcfe",
        "deep": "[" * 100_000,
        "long": good + " " * 2_000_000,
        "negative": good.replace("0.1", "-0.1"),
        "pairs": json.dumps({**body, "agreement": [[2.0, True]]}),
    }
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(contents[damage].encode("utf-8", "surrogateescape"))
    assert load_or_calibrate({"threads": 1}, measurement, tmp_path).to_dict() == CALIBRATION.to_dict()
    assert measurement.count == 2
    assert "measuring anew" in caplog.text
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    if damage != "folder":
        load_or_calibrate({"threads": 1}, measurement, tmp_path)
        assert measurement.count == 2  # the damage is repaired


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    measurement = Measurement()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), None):
        assert load_or_calibrate({}, measurement, folder) is CALIBRATION


def test_the_folder_is_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("EDGE_SPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "edge-spec" / "calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "edge-spec" / "calibration"


def test_another_power_mode_is_measured_anew(tmp_path: Path) -> None:
    measurement = Measurement()

    def load(root: Path) -> None:
        load_or_calibrate({"machine": machine(root=root)}, measurement, tmp_path / "kept")

    load(jetson(tmp_path / "device", mode=0))
    load(jetson(tmp_path / "device", mode=0))
    assert measurement.count == 1
    load(jetson(tmp_path / "device", mode=2))
    assert measurement.count == 2
    load(jetson(tmp_path / "device", mode=0))  # which is known already
    assert measurement.count == 2


def test_clocks_of_the_moment_are_not_measured_anew(tmp_path: Path) -> None:
    before = machine(root=jetson(tmp_path, gpu_hz=1_020_000_000))
    assert machine(root=jetson(tmp_path, gpu_hz=306_000_000)) == before


def test_a_mode_of_the_same_number_and_another_name_is_another_one(tmp_path: Path) -> None:
    before = machine(root=jetson(tmp_path))
    write_tree(tmp_path, {"etc/nvpmodel.conf": "< POWER_MODEL ID=2 NAME=25W >"})
    assert machine(root=tmp_path) != before


def test_on_a_gpu_its_name_and_power_limit_count_and_its_clocks_do_not() -> None:
    def on(**changes: Any) -> dict[str, Any]:
        return machine(True, find=lambda: FakeNvml([{**H200, **changes}]))

    assert on(clocks={1: 345, 2: 1593}, celsius=30, reasons=1) == on()
    assert on(milliwatts=500_000) != on()
    assert on(name="NVIDIA A100") != on()
    assert machine(False, find=lambda: FakeNvml([H200])) == machine(False, find=lambda: None)
    json.dumps(on())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """The calibrations that engines measured."""
    results: list[Calibration] = []

    def watched(*arguments: Any, **options: Any) -> Calibration:
        results.append(calibrate(*arguments, **options))
        return results[-1]

    monkeypatch.setattr("edge_spec.runtime.loaded_pair.calibrate", watched)
    return results


def test_an_engine_measures_once_for_each_setting(
    tiny_bundle: Bundles, folder: Path, measured: list[Calibration]
) -> None:
    path = tiny_bundle(draft="close")
    for _ in range(2):
        with edge_spec.load(path, threads=1) as engine:
            assert engine.calibration.to_dict() == measured[0].to_dict()
    assert len(measured) == 1
    for other in ({"threads": 2}, {"threads": 1, "context": 100}):
        edge_spec.load(path, **other).close()
    edge_spec.load(tiny_bundle(), threads=1).close()
    assert len(measured) == 4
    edge_spec.load(path, threads=1, calibration="fresh").close()
    assert len(measured) == 5
    assert len(list(calibrations(folder))) == 4


def test_an_engine_takes_a_calibration_that_it_is_given(
    tiny_bundle: Bundles, folder: Path, measured: list[Calibration]
) -> None:
    with edge_spec.load(tiny_bundle(), calibration=CALIBRATION) as engine:
        assert engine.calibration.to_dict() == CALIBRATION.to_dict()
        assert engine.calibration.costs is not CALIBRATION.costs  # which learn, and belong to one engine
    assert not measured
    assert not list(calibrations(folder))
    with pytest.raises(RequestError, match="calibration is 'stale', expected"):
        edge_spec.load(tiny_bundle(), calibration="stale")  # type: ignore[arg-type]


def calibrations(folder: Path) -> list[Path]:
    """What lies beside the notes on what loading took."""
    return [file for file in folder.glob("*.json") if not file.name.startswith("memory-")]


def tiny_pair(path: Path) -> tuple[Model, Model, list[int]]:
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    target, draft = (
        Model(bundle, record, ["CPUExecutionProvider"], 256, exact_rows)
        for record, exact_rows in ((bundle.manifest.target, True), (bundle.manifest.draft, False))
    )
    return target, draft, TextTokenizer(bundle.tokenizer_path).encode(TEXT)


def test_the_agreement_of_a_real_pair_is_that_of_its_models(tiny_bundle: Bundles) -> None:
    target, draft, tokens = tiny_pair(tiny_bundle(draft="close"))
    pairs = calibrate(target, draft, tokens).agreement
    assert target.cache.length == draft.cache.length == 0

    text = tokens[:16]
    expected = []
    for _ in pairs:
        guess = draft.forward(text, (len(text) - 1,))[0].astype(np.float64)
        token = int(target.forward(text, (len(text) - 1,))[0].argmax())
        probabilities = np.exp(guess - guess.max()) / np.exp(guess - guess.max()).sum()
        expected.append((float(probabilities.max()), int(guess.argmax()) == token))
        text.append(token)
        target.cache.rollback(0)
        draft.cache.rollback(0)
    assert [agreed for _, agreed in pairs] == [agreed for _, agreed in expected]
    assert [p for p, _ in pairs] == pytest.approx([p for p, _ in expected], abs=1e-3)
    assert any(agreed for _, agreed in pairs)


def test_calls_after_a_calibration_are_those_of_a_new_model(tiny_bundle: Bundles) -> None:
    tokens = np.random.default_rng(1).integers(0, TOKENS, 40).tolist()
    target, draft, text = tiny_pair(tiny_bundle(draft="close"))
    calibrate(target, draft, text)
    fresh, _, _ = tiny_pair(tiny_bundle(draft="close"))
    for model in (target, fresh):
        model.prefill(tokens[:-4])
    assert np.array_equal(target.forward(tokens[-4:], range(4)), fresh.forward(tokens[-4:], range(4)))


def test_only_room_that_there_is_can_be_filled(tiny_bundle: Bundles) -> None:
    target, _, _ = tiny_pair(tiny_bundle(draft="close"))
    target.cache.fill(100)
    assert target.cache.length == 100
    for length in (99, 10_000):
        with pytest.raises(RequestError, match=f"fill the cache up to {length}"):
            target.cache.fill(length)
