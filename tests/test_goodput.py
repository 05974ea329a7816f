from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.runtime.goodput import Goodput, ProbingCredit


def test_the_rate_follows_the_rounds() -> None:
    goodput = Goodput(10.0)
    assert goodput.rate == pytest.approx(10.0)
    for _ in range(200):
        goodput.record(3, 0.1)
    assert goodput.rate == pytest.approx(30.0, rel=0.01)


@given(st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(0.0, 1.0)), max_size=200))
def test_probes_never_cost_more_than_a_percent_of_the_time(rounds: list[tuple[float, float]]) -> None:
    credit = ProbingCredit()
    elapsed = spent = 0.0
    for seconds, probe in rounds:
        credit.grow(seconds)
        elapsed += seconds
        if credit.spend(probe):
            spent += probe
        assert spent <= 0.01 * elapsed + 1e-9


def test_a_probe_that_can_be_paid_is_made() -> None:
    credit = ProbingCredit()
    credit.grow(10.0)
    assert not credit.spend(0.11)
    assert credit.spend(0.09)
    assert not credit.spend(0.09)


def test_no_text_pays_for_the_time_of_others() -> None:
    credit = ProbingCredit()
    credit.grow(3600.0)
    assert credit.spend(0.3) and not credit.spend(0.01)
