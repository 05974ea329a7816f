"""The cost model: curves through measurements, corrections that follow the machine, files that are nonsense."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CHUNK_ROWS, CallCosts, Costs

ROWS = (1, 2, 4, 8, 16)
CURVE = CostCurve(ROWS, (0.09, 0.09, 0.1, 0.16, 0.29), (1e-5, 1e-5, 2e-5, 4e-5, 8e-5))
SHOWN = range(1, 17)

seconds = st.floats(1e-5, 10.0)


def costs(draft: CostCurve | None = CURVE) -> Costs:
    return Costs(CallCosts(CURVE), None if draft is None else CallCosts(draft), 1e-3)


def live(
    model: CallCosts, choose: Callable[[random.Random], int], factor: Callable[[int], float], calls: int, noise: float
) -> None:
    """Let a machine that is off by a factor run calls of chosen rows, one in twenty of them three times too slow."""
    dice = random.Random(4)
    for _ in range(calls):
        rows = choose(dice)
        slow = 3.0 if dice.random() < 0.05 else 1.0
        model.observe(rows, 100, CURVE.at(rows, 100) * factor(rows) * slow * math.exp(dice.gauss(0.0, noise)))


def test_measured_costs_come_back() -> None:
    assert [CURVE.at(rows, 0) for rows in ROWS] == pytest.approx(CURVE.seconds)
    assert [CURVE.at(rows, 1000) for rows in ROWS] == pytest.approx([0.1, 0.1, 0.12, 0.2, 0.37])


def test_costs_are_linear_between_row_counts_and_beyond_the_widest() -> None:
    assert CURVE.at(6, 0) == pytest.approx(0.13)
    assert CURVE.at(6, 1000) == pytest.approx(0.16)
    assert CURVE.at(24, 0) == pytest.approx(0.42)
    assert CURVE.at(24, 1000) == pytest.approx(0.54)


def test_a_single_row_count_goes_for_all() -> None:
    assert CostCurve((1,), (0.1,), (0.0,)).at(7, 500) == 0.1


@pytest.mark.parametrize("rows", [1, 3, 8, 11, 16, 40])
@pytest.mark.parametrize("past", [0, 77, 5000])
def test_the_cost_model_begins_as_its_curve(rows: int, past: int) -> None:
    assert costs().verify(rows, past) == pytest.approx(CURVE.at(rows, past))
    assert costs().draft(past, rows) == pytest.approx(CURVE.at(rows, past))


@given(st.dictionaries(st.integers(2, 64), seconds, max_size=12), seconds, st.lists(seconds, min_size=2, max_size=2))
def test_whatever_was_measured_more_rows_never_cost_less(near: dict[int, float], one: float, far: list[float]) -> None:
    widest = max(near, default=1)
    curve = CostCurve.fit(30, {1: one, **near}, 1000, {1: far[0], widest: far[1]})
    for past in (0, 30, 4000):
        times = [curve.at(rows, past) for rows in range(1, widest + 20)]
        assert times[0] > 0
        assert all(left <= right * (1 + 1e-9) for left, right in itertools.pairwise(times))
        assert all(curve.at(rows, past) <= curve.at(rows, past + 1) for rows in range(1, widest + 1))


def test_a_disturbed_measurement_is_corrected_by_a_wider_call() -> None:
    curve = CostCurve.fit(0, {1: 0.1, 2: 0.1, 3: 0.3, 4: 0.12, 8: 0.2})
    assert curve.seconds == pytest.approx((0.1, 0.1, 0.12, 0.12, 0.2))


def test_growth_with_the_past_is_interpolated_in_rows() -> None:
    curve = CostCurve.fit(100, {1: 0.1, 8: 0.2, 16: 0.4}, 1100, {1: 0.11, 8: 0.28})
    assert [curve.at(rows, 100) for rows in (1, 8, 16)] == pytest.approx([0.1, 0.2, 0.4])
    assert [curve.at(rows, 1100) for rows in (1, 8, 16)] == pytest.approx([0.11, 0.28, 0.56])


def test_a_past_that_seems_to_speed_calls_up_is_taken_for_noise() -> None:
    assert CostCurve.fit(100, {1: 0.1, 8: 0.2}, 1100, {1: 0.09, 8: 0.15}).growth == (0.0, 0.0)


def test_growth_lost_in_noise_is_taken_from_a_wider_call() -> None:
    curve = CostCurve.fit(0, {1: 0.1, 8: 0.2}, 1000, {1: 0.09, 8: 0.28})
    assert curve.growth == pytest.approx((1e-5, 8e-5))


def test_catching_up_is_paid_by_the_chunk() -> None:
    model = costs()
    expected = sum(CURVE.at(CHUNK_ROWS, past) for past in (50, 50 + CHUNK_ROWS)) + CURVE.at(3, 50 + 2 * CHUNK_ROWS)
    assert model.draft(50, 2 * CHUNK_ROWS + 3) == pytest.approx(expected)
    assert model.draft(50, CHUNK_ROWS) == pytest.approx(CURVE.at(CHUNK_ROWS, 50))


def test_drafting_without_a_draft_model_costs_nothing() -> None:
    model = costs(draft=None)
    model.observe_draft(1, 0, 0.5)
    assert model.draft(100, 7) == 0.0


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_change_of_speed_is_followed_though_only_one_row_count_is_seen(factor: float) -> None:
    model = CallCosts(CURVE)
    live(model, lambda dice: 5, lambda rows: factor, 150, 0.05)
    # The row counts that nobody saw have followed as well, with their ratios as they were measured.
    assert [model.seconds(rows, 100) / CURVE.at(rows, 100) for rows in SHOWN] == pytest.approx([factor] * 16, rel=0.1)
    one = model.seconds(1, 100)
    assert [model.seconds(rows, 100) / one for rows in SHOWN] == pytest.approx(
        [CURVE.at(rows, 100) / CURVE.at(1, 100) for rows in SHOWN]
    )


def test_a_change_of_speed_hardly_bends_the_curve_whatever_is_seen() -> None:
    model = CallCosts(CURVE)
    for factor in (2.0, 0.7, 1.5):
        live(model, lambda dice: dice.choice((1, 5, 5, 5, 6)), lambda rows, factor=factor: factor, 150, 0.05)
        ratios = [model.seconds(rows, 100) / CURVE.at(rows, 100) for rows in SHOWN]
        assert ratios == pytest.approx([factor] * 16, rel=0.15)


def test_ratios_between_row_counts_follow_what_is_seen() -> None:
    model = CallCosts(CURVE)
    live(model, lambda dice: dice.choice((1, 4, 4, 4)), lambda rows: 1.4 if rows > 2 else 1.0, 400, 0.05)
    assert model.seconds(4, 100) / CURVE.at(4, 100) == pytest.approx(1.4, rel=0.08)
    assert model.seconds(1, 100) / CURVE.at(1, 100) == pytest.approx(1.0, rel=0.08)
    # Row counts next to one that turned out dear are dearer, too.
    assert model.seconds(5, 100) / CURVE.at(5, 100) > 1.2


def test_a_single_slow_call_changes_little() -> None:
    model = CallCosts(CURVE)
    live(model, lambda dice: 4, lambda rows: 1.0, 100, 0.0)
    before = model.seconds(4, 100)
    model.observe(4, 100, 50 * before)
    assert before < model.seconds(4, 100) < 1.05 * before


def test_the_speed_of_the_draft_model_is_its_own() -> None:
    model = costs()
    for _ in range(100):
        model.observe_draft(1, 0, 2 * CURVE.at(1, 0))
        model.observe_verify(3, 0, CURVE.at(3, 0))
    assert model.draft(0) == pytest.approx(2 * CURVE.at(1, 0), rel=0.02)
    assert model.verify(1, 0) == pytest.approx(CURVE.at(1, 0))


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(time: float) -> None:
    model = costs()
    model.observe_verify(1, 0, time)
    assert model.verify(1, 0) == pytest.approx(CURVE.at(1, 0))


def test_calls_wider_than_any_that_was_measured_say_nothing() -> None:
    model = costs()
    model.observe_verify(200, 0, 1e-3)
    assert model.verify(16, 0) == pytest.approx(CURVE.at(16, 0))


def test_overhead_follows_and_survives_an_outlier() -> None:
    model = costs()
    for _ in range(100):
        model.observe_overhead(3e-3)
    assert model.overhead == pytest.approx(3e-3, rel=0.01)
    model.observe_overhead(5.0)
    assert model.overhead < 3.5e-3


@pytest.mark.parametrize("draft", [None, CURVE])
def test_costs_survive_a_file(draft: CostCurve | None) -> None:
    written = json.loads(json.dumps(costs(draft).to_dict()))
    again = Costs.from_dict(written)
    assert again.to_dict() == written
    assert again.verify(7, 300) == pytest.approx(CURVE.at(7, 300))
    assert again.draft(0) == (0.0 if draft is None else pytest.approx(CURVE.at(1, 0)))


GOOD = {"rows": [1, 2], "seconds": [0.1, 0.2], "growth": [0.0, 0.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1, 1]},
        {"rows": [2, 3]},
        {"rows": [1, 2.0]},
        {"rows": [1, True]},
        {"rows": [1, 10**9]},
        {"rows": [1, 2, 3]},
        {"rows": []},
        {"rows": "12"},
        {"rows": None},
        {"seconds": [0.1, -0.2]},
        {"seconds": [0.0, 0.2]},
        {"seconds": [0.2, 0.1]},
        {"seconds": [0.1, math.nan]},
        {"seconds": [0.1, math.inf]},
        {"seconds": [0.1, 1e9]},
        {"seconds": [0.1, "0.2"]},
        {"growth": [0.0, -1e-9]},
        {"growth": [1e-3, 0.0]},
        {"growth": [0.0, None]},
        {"rows": list(range(1, 100)), "seconds": [0.1] * 99, "growth": [0.0] * 99},
    ],
)
def test_nonsense_is_no_curve(change: dict[str, Any]) -> None:
    assert CostCurve.from_dict(GOOD).at(2, 0) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="expected|row counts|no cost curve"):
        CostCurve.from_dict({**GOOD, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"target": None},
        {"target": []},
        {"draft": 3},
        {"overhead": -1.0},
        {"overhead": math.nan},
        {"draft": ...},
        {"chain_step": 0.0},
        {"chain_step": "1"},
    ],
)
def test_nonsense_is_no_cost_model(change: dict[str, Any]) -> None:
    body = {"target": GOOD, "draft": GOOD, "overhead": 0.001, "chain_step": 1.0, **change}
    with pytest.raises(ValueError, match="cost curve|overhead|chain_step|are no costs"):
        Costs.from_dict({key: value for key, value in body.items() if value is not ...})
    with pytest.raises(ValueError, match="are no costs"):
        Costs.from_dict([body])
