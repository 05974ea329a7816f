from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.runtime.acceptance import AcceptanceTable


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.booleans()), max_size=60))
def test_estimates_are_probabilities_whatever_was_seen(seen: list[tuple[str, int, bool]]) -> None:
    table = AcceptanceTable()
    table.record((("drafter", kind, number), kept) for kind, number, kept in seen)
    for evidence in (("drafter",), ("drafter", "a"), ("drafter", "b", 1), ("nobody", 7)):
        assert 0.0 < table.estimate(evidence) < 1.0


def test_estimates_approach_what_is_observed() -> None:
    table = AcceptanceTable()
    random = np.random.default_rng(0)
    estimates = []
    for kept in random.random(2000) < 0.7:
        table.record([(("drafter", 1), bool(kept))])
        estimates.append(table.estimate(("drafter", 1)))
    assert np.mean(estimates[200:]) == pytest.approx(0.7, abs=0.03)


def test_what_was_seen_seldom_is_judged_by_what_it_begins_with() -> None:
    table = AcceptanceTable()
    table.record([(("drafter", "good", 1), True)] * 50 + [(("drafter", "bad", 1), False)] * 50)
    assert table.estimate(("drafter", "good", 2)) > 0.8
    assert table.estimate(("drafter", "bad", 2)) < 0.2
    assert 0.3 < table.estimate(("drafter", "new", 2)) < 0.7


def test_a_prior_is_overruled_by_experience() -> None:
    table = AcceptanceTable({("drafter", 1): 0.9})
    assert table.estimate(("drafter", 1)) == table.estimate(("drafter", 1, 5)) == 0.9
    assert table.estimate(("drafter", 2)) == 0.25
    table.record([(("drafter", 1, 5), False)] * 100)
    assert table.estimate(("drafter", 1, 5)) < 0.1


def test_old_observations_are_forgotten() -> None:
    table = AcceptanceTable()
    table.record([(("drafter", 1), True)] * 1000)
    table.record([(("drafter", 1), False)] * 150)
    assert table.estimate(("drafter", 1)) < 0.15
