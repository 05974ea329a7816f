"""A memory budget as callers write it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.byte_size import parse_size, size_text
from edge_spec.errors import RequestError
from edge_spec.runtime.memory_budget import DEFAULT_SHARE, budget_bytes

FREE = 8 << 30


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("2GiB", 2 << 30),
        ("800MB", 800_000_000),
        ("1.5 GiB", 3 << 29),
        (" 64 kib ", 64 << 10),
        ("2g", 2 << 30),
        ("1000000", 1_000_000),
        ("10b", 10),
        (1 << 30, 1 << 30),
        (0.5, FREE // 2),
        (1, FREE),
        (1.0, FREE),
        ("50%", FREE // 2),
        ("0.25", FREE // 4),
        (None, int(DEFAULT_SHARE * FREE)),
    ],
)
def test_budgets_in_bytes_and_shares_are_understood(budget: Any, expected: int) -> None:
    assert budget_bytes(budget, FREE) == expected


@pytest.mark.parametrize(
    "budget", ["", "much", "2 GiBs", "-1GiB", "1e9", "150%", "0%", "0", 0, -5, 0.0, 1.5, -0.5, float("nan"), True, [1]]
)
def test_anything_else_is_refused_with_what_was_given(budget: Any) -> None:
    with pytest.raises(RequestError, match="--budget is .*expected"):
        budget_bytes(budget, FREE, "--budget")


def test_a_refusal_quotes_what_was_written_and_names_every_form() -> None:
    with pytest.raises(RequestError, match="memory_budget is '200%', expected a share of what is free above 0"):
        budget_bytes("200%", FREE)
    with pytest.raises(RequestError, match="'2GiB', a number of bytes, or a share of what is free such as '50%'"):
        budget_bytes("2GiBB", FREE)


def test_a_share_of_what_nobody_knows_is_refused() -> None:
    with pytest.raises(RequestError, match="give bytes instead"):
        budget_bytes(0.5, None)
    assert budget_bytes("1GiB", None) == 1 << 30
    assert budget_bytes(None, None) is None


@given(st.integers(1, 1 << 40))
def test_bytes_written_as_text_come_back(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(f"{size}KiB") == size * 1024


@given(st.integers(0, 1 << 45))
def test_sizes_shown_to_a_person_are_within_their_rounding(size: int) -> None:
    assert abs(parse_size(size_text(size)) - size) <= max(512, 0.06 * size)


@given(st.integers(0, 1 << 45))
def test_a_size_rounded_up_is_enough_when_it_is_typed_again(size: int) -> None:
    enough = parse_size(size_text(size, up=True))
    assert size <= enough <= size + max(1024, 0.01 * size + 110_000)


@pytest.mark.parametrize("budget", ["50%", 0.5, None])
def test_a_share_of_nothing_says_that_nothing_is_free(budget: Any) -> None:
    with pytest.raises(RequestError, match="but nothing is free"):
        budget_bytes(budget, 0)
