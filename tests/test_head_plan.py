"""Heads in the memory plan: what they take, when one is loaded in place of a draft model, and how they are shed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory_plan import INT8_KV, LEAST, MIB, MOST, PAIR, items, model, worth

from edge_spec.errors import MemoryBudgetError, RequestError
from edge_spec.manifest import FileRecord, GraphRecord, HeadKind, HeadRecord, Manifest
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.calibration_cache import FORMAT, KeptCalibration, keep, kept_calibrations, machine
from edge_spec.runtime.configuration import DrafterChoice
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.drafter_outlook import best_speed
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_law import memory_items
from edge_spec.runtime.memory_plan import MemoryPlan
from edge_spec.runtime.memory_profile import MemoryProfile

GRAPH = (GraphRecord("target/head.onnx", tree=False, kv="float32"),)


def head(kind: HeadKind = "eagle3", layers: int = 1, columns: int = 32000, tokens: int = 1, **facts: Any) -> HeadRecord:
    record = model(layers, 1536, facts.pop("inner", 8960), 12, 128, "w8a8", 32)
    sizes = replace(record.architecture, logits_size=columns, **facts)
    record = replace(record, architecture=sizes, graphs=GRAPH)
    return HeadRecord(kind, (2, 14, 25), record, tokens, names_columns=columns != 151936)


TOLD = replace(PAIR.target, graphs=tuple(replace(graph, taps=(2, 14, 25)) for graph in PAIR.target.graphs))
BOTH = replace(PAIR, target=TOLD, head=head())
ALONE = replace(BOTH, draft=None)
# Whose head takes far more than its draft.
HEAVY = replace(BOTH, head=head("dflash", layers=24, tokens=8))
BUDGETS = st.integers(LEAST, MOST + 400 * MIB)
EITHER = st.sampled_from([BOTH, ALONE, HEAVY])


def plan(manifest: Manifest, budget: int | None, **wishes: Any) -> MemoryPlan:
    return plan_memory(manifest, budget, kv_types=INT8_KV, **wishes)


def loaded(found: MemoryPlan) -> str:
    return "head" if found.configuration.head else "model" if found.configuration.draft else "none"


@settings(deadline=None, max_examples=40)
@given(EITHER, BUDGETS, st.integers(1, 3))
def test_a_plan_with_a_head_stays_within_its_budget_and_adds_up(
    manifest: Manifest, budget: int, conversations: int
) -> None:
    found = plan(manifest, budget, conversations=conversations)
    assert found.fits
    assert found.total_bytes == sum(item.bytes for item in found.items) <= budget
    assert found.items == memory_items(manifest, found.configuration)
    assert not (found.configuration.head and found.configuration.draft)


def rank(found: MemoryPlan) -> tuple[float, ...]:
    """A configuration as numbers, more being better; a preferred drafter is better than the other."""
    names = [one.drafter for one in found.outlooks]
    numbers = list(worth(found.configuration))
    numbers[2] = 0 if loaded(found) == "none" else len(names) - names.index(loaded(found))
    if loaded(found) != "model":
        numbers[3:5] = 0, 0
    return tuple(numbers)


@settings(deadline=None, max_examples=40)
@given(EITHER, BUDGETS, BUDGETS)
def test_a_larger_budget_never_brings_a_worse_plan(manifest: Manifest, one: int, other: int) -> None:
    small, large = (plan(manifest, budget) for budget in sorted((one, other)))
    assert rank(small) <= rank(large)


@settings(deadline=None, max_examples=40)
@given(EITHER, BUDGETS)
def test_what_a_larger_budget_would_bring_comes_with_it_and_not_before(manifest: Manifest, budget: int) -> None:
    found = plan(manifest, budget)
    if found.next_larger is None:
        assert not found.given_up
        return
    needed = found.next_larger.budget_bytes
    assert rank(plan(manifest, needed - 1)) == rank(found)
    better = plan(manifest, needed)
    assert better.configuration == found.next_larger.configuration
    assert rank(better) > rank(found)
    assert "would bring" in str(found) and "True" not in str(found)


@settings(deadline=None, max_examples=40)
@given(BUDGETS, st.integers(0, 2))
def test_a_bundle_without_a_head_is_planned_as_if_there_were_none(budget: int, conversations: int) -> None:
    """Nothing of what it says mentions heads."""
    found = plan(PAIR, budget, conversations=1 + conversations)
    untold = replace(BOTH, target=PAIR.target)
    same = (
        plan(untold, budget, conversations=1 + conversations, drafter="model") if found.configuration.draft else found
    )
    assert replace(same, outlooks=(), given_up=(), next_larger=None) == replace(found, given_up=(), next_larger=None)
    assert "head" not in json.dumps(found.to_json()) + str(found)


COSTS = st.floats(0.001, 0.5)


def calibration(step: float, share: float, row: float = 0.02) -> Calibration:
    """Of a target with a plain step of 0.2 seconds; so much of a drafter's tokens were right."""
    rows = (1, 2, 64)
    target = CallCosts(CostCurve(rows, tuple(0.2 + row * (count - 1) for count in rows), (0.0,) * 3))
    draft = CallCosts(CostCurve(rows, tuple(step for _ in rows), (0.0,) * 3))
    return Calibration(Costs(target, draft, 0.0), tuple((0.5, index < 40 * share) for index in range(40)))


@settings(deadline=None, max_examples=60)
@given(COSTS, COSTS, st.floats(0, 1), st.floats(0, 1), st.sampled_from([BOTH, HEAVY]))
def test_the_head_is_chosen_exactly_when_it_gains_more_for_each_byte(
    head_step: float, draft_step: float, head_share: float, draft_share: float, manifest: Manifest
) -> None:
    """As computed here from scratch, with what an earlier load has measured, and with room for either."""
    kept = [
        KeptCalibration("head", calibration(head_step, head_share)),
        KeptCalibration("model", calibration(draft_step, draft_share)),
    ]
    found = plan(manifest, None, kept=kept)
    assert manifest.head is not None

    def gain(step: float, share: float, block: int) -> float:
        accepted = 0.0
        for right in [index < 40 * share for index in range(40)]:  # recent ones count for more
            accepted = (1 - 1 / 50) * accepted + right
        verified = sum((1 - 1 / 50) ** index for index in range(40))
        a = (accepted + 4 * 0.6) / (verified + 4)
        speeds = []
        for tokens in range(1, 9):
            seconds = 0.2 + 0.02 * tokens + step * math.ceil(tokens / block)
            speeds.append(sum(a**depth for depth in range(tokens + 1)) * 0.2 / seconds)
        return max(speeds) - 1

    gains = {"head": gain(head_step, head_share, manifest.head.tokens), "model": gain(draft_step, draft_share, 1)}
    without = {name: plan(manifest, None, drafter=name) for name in ("head", "model", "none")}
    staying = {name: sum(item.bytes for item in one.items if item.name != "loading") for name, one in without.items()}
    value = {
        name: gained / (staying[name] - staying["none"]) if gained > 0 else gained for name, gained in gains.items()
    }
    for one in found.outlooks:
        assert one.gain == pytest.approx(gains[one.drafter], abs=1e-9)
        assert (one.bytes, one.basis) == (staying[one.drafter] - staying["none"], "measured")
    if abs(value["head"] - value["model"]) > 1e-15:
        assert loaded(found) == max(value, key=lambda name: value[name])
        assert f"of the two the {'head' if loaded(found) == 'head' else 'draft model'} is loaded" in str(found)


def test_by_sizes_alone_a_small_head_is_preferred_to_a_draft_model() -> None:
    found = plan(BOTH, None)
    assert [one.drafter for one in found.outlooks] == ["head", "model"]
    assert {one.basis for one in found.outlooks} == {"law"}
    assert 0 < found.outlooks[0].bytes < found.outlooks[1].bytes
    assert loaded(found) == "head"
    sentence = "of the two the head is loaded: the head is expected to bring"
    assert sentence in str(found) and "more for each byte than the draft model" in str(found)


def test_a_draft_that_an_earlier_load_found_much_faster_is_loaded_instead() -> None:
    kept = [KeptCalibration("head", calibration(0.2, 0.0)), KeptCalibration("model", calibration(0.01, 1.0))]
    found = plan(BOTH, None, kept=kept)
    assert (loaded(found), found.outlooks[0].gain > 0 > found.outlooks[1].gain) == ("model", True)
    assert "as measured here" in str(found)


def test_where_the_preferred_does_not_fit_the_other_does() -> None:
    kept = [KeptCalibration("head", calibration(0.001, 1.0)), KeptCalibration("model", calibration(0.2, 0.0))]
    budgets = range(MOST + 400 * MIB, LEAST, -8 * MIB)
    plans = [plan(HEAVY, budget, kept=kept) for budget in budgets]
    assert list(dict.fromkeys(map(loaded, plans))) == ["head", "model", "none"]
    tight = next(found for found in plans if loaded(found) == "model")
    assert [loss.what for loss in tight.given_up][-1] == "head"
    assert "of the two the draft model is loaded for want of memory" in str(tight)
    assert "head: the budget lacks" in str(tight)
    least = next(found for found in plans if loaded(found) == "none")
    assert "of the two neither is loaded for want of memory" in str(least)


@pytest.mark.parametrize("drafter", ["head", "model", "none"])
def test_a_drafter_that_is_insisted_on_is_loaded_or_the_bundle_is_refused(drafter: DrafterChoice) -> None:
    assert loaded(plan(BOTH, None, drafter=drafter)) == drafter
    least = plan(BOTH, 1, drafter=drafter).total_bytes
    assert loaded(plan(BOTH, least, drafter=drafter)) == drafter
    with pytest.raises(MemoryBudgetError):
        plan(BOTH, least - 1, drafter=drafter).require_fit()
    if drafter != "head":
        assert "is loaded as asked for" in str(plan(BOTH, None, drafter=drafter))


def test_a_drafter_that_the_bundle_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match="drafter is 'head', expected 'auto' or 'model' or 'none'.*has no head"):
        plan(PAIR, None, drafter="head")
    with pytest.raises(RequestError, match="drafter is 'model', expected 'auto' or 'head' or 'none'.*no draft model"):
        plan(ALONE, None, drafter="model")
    with pytest.raises(RequestError, match="drafter is 'both', expected 'auto' or 'model' or 'head' or 'none'"):
        plan(BOTH, None, drafter="both")


def test_a_head_takes_what_its_design_has() -> None:
    """EAGLE-3: three hidden states joined into one, a layer that reads pairs, and an lm_head of its own."""
    found = items(plan(ALONE, None, context=2048))
    matrices = 3 * 1536 * 1536 + 2 * 1536 * (1536 + 512) + 1536 * 1536 + 3 * 1536 * 8960 + 1536 * 32000
    assert found["head weights"] == pytest.approx(matrices, rel=0.1)  # and the rows of the embedding that it reads
    exact = 2 * 2 * 128 * 4 * 2048
    assert exact <= found["head KV cache"] < 1.6 * exact
    row = 3 * 1536 * 4
    assert 1024 * row <= found["hidden states"] <= (1024 + 8 * 32) * row
    assert found["tap outputs"] >= 64 * row
    without = items(plan(ALONE, None, context=2048, drafter="none"))
    assert not {name for name in without if "head" in name or "hidden" in name}
    assert 0 < without["tap outputs"] < found["tap outputs"]  # which are computed whether somebody reads them or not
    assert found["provider"] > without["provider"]


def test_an_lm_head_that_is_the_targets_counts_once_more() -> None:
    shared = items(plan(replace(ALONE, head=head(columns=151936)), None))["head weights"]
    own = items(plan(ALONE, None))["head weights"]
    assert shared - own == pytest.approx(1536 * (151936 - 32000), rel=0.01)


def test_heads_of_medusa_have_no_cache_and_an_lm_head_each() -> None:
    four = items(plan(replace(ALONE, head=head("medusa", tokens=4, ropes=())), None))
    assert four["head KV cache"] == 0
    assert four["head weights"] == pytest.approx(4 * 1536 * (1536 + 32000), rel=0.01)


def test_hidden_states_count_for_every_text_that_can_take_turns() -> None:
    one, four = (items(plan(ALONE, None, context=2048, conversations=n))["hidden states"] for n in (1, 4))
    assert four - one == 3 * 8 * 32 * 3 * 1536 * 4


def test_what_a_load_has_measured_of_a_head_is_taken() -> None:
    law = items(plan(ALONE, None))["head weights"]
    one, other = (plan(ALONE, None, profile=MemoryProfile(head_weights=size * MIB)) for size in (130, 140))
    assert {item.name: item.basis for item in one.items}["head weights"] == "measured"
    assert items(other)["head weights"] - items(one)["head weights"] == 10 * MIB
    assert items(plan(ALONE, None, profile=MemoryProfile(head_weights=1 << 36)))["head weights"] == law


def test_the_json_of_a_plan_tells_both_outlooks() -> None:
    body = json.loads(json.dumps(plan(BOTH, MOST).to_json()))
    assert body["configuration"]["head"] is True
    assert [one["drafter"] for one in body["outlooks"]] == ["head", "model"]
    assert set(body["outlooks"][0]) == {"drafter", "gain", "bytes", "basis"}


def test_calibrations_of_this_bundle_and_machine_are_found_again_the_latest_first(tmp_path: Path) -> None:
    key = {"format": FORMAT, "bundle": BOTH.digest, "machine": machine()}
    of_model, of_head = calibration(0.1, 0.5), calibration(0.02, 0.5)
    keep(tmp_path / "a.json", {"key": {**key, "draft": "cpu", "head": False}, **of_model.to_dict()})
    keep(tmp_path / "b.json", {"key": {**key, "draft": None, "head": True}, **of_head.to_dict()})
    keep(tmp_path / "c.json", {"key": {**key, "bundle": "another", "head": True}, **of_head.to_dict()})
    (tmp_path / "d.json").write_text("[" * 5000)
    found = kept_calibrations(BOTH, tmp_path)
    assert sorted(str(one.drafter) for one in found) == ["head", "model"]
    by_name = {one.drafter: one.calibration.costs.draft(0) for one in found}
    assert by_name == {"head": pytest.approx(0.02), "model": pytest.approx(0.1)}
    assert kept_calibrations(BOTH, tmp_path / "nowhere") == []


@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0))
def test_the_best_chain_is_no_worse_than_any(acceptance: float, step: float) -> None:
    best = best_speed(acceptance, lambda rows: 1 + 0.1 * (rows - 1), lambda tokens: step * tokens)
    for tokens in range(1, 9):
        expected = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
        assert best >= expected / (1 + (0.1 + step) * tokens) - 1e-9


def file_records() -> dict[str, FileRecord]:
    return {**PAIR.files, "target/head.onnx.data": FileRecord(60 * MIB, "")}


def test_inspecting_a_bundle_with_both_says_which_is_loaded_and_why() -> None:
    from edge_spec.inspection import describe_bundle

    text = describe_bundle(Path("coder.pair"), replace(BOTH, files=file_records()))
    assert "of the two the head is loaded: the head is expected to bring" in text
    assert "hidden states behind 2, 14, 25 of its 28 layers" in text
    assert "32,000 of the target's ids, a token a call" in text
    assert "of the two" not in describe_bundle(Path("coder.pair"), replace(ALONE, files=file_records()))
