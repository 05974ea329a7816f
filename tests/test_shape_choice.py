"""Which shape a call gets where each row is to keep its bits."""

from __future__ import annotations

import pytest

from edge_spec.export.recipe import RECIPES
from edge_spec.runtime.shape_choice import ShapeChoice, rows_of_one_block


def rows(recipe: str, *wanted: int, exact: bool = True, fixed: int | None = None) -> list[int]:
    choice = ShapeChoice(exact, fixed, rows_of_one_block(RECIPES[recipe].to_dict()), None, 0)
    shapes = [choice.of(each, each, past=5, snaps=False) for each in wanted]
    assert all(shape.logit_rows == shape.rows for shape in shapes)
    return [shape.rows for shape in shapes]


@pytest.mark.parametrize("recipe", ["w8a8", "int4", "fp32"])
def test_no_call_has_one_row_and_none_ends_with_a_block_of_one(recipe: str) -> None:
    assert rows(recipe, 1, 2, 3, 5, 15, 16, 17, 33, 34) == [2, 2, 3, 5, 15, 16, 18, 34, 34]


def test_weights_with_wide_blocks_take_rows_by_twos() -> None:
    assert rows("int4-128", 1, 2, 3, 5, 8, 17) == [2, 2, 4, 6, 8, 18]


def test_others_come_as_they_are() -> None:
    assert rows("int4-128", 1, 3, 17, exact=False) == [1, 3, 17]
    assert rows("int4-128", 1, 3, fixed=8) == [8, 8]
