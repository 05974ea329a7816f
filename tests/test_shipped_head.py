"""The head that comes with edge-spec: how large it is, and what it does for the target it was trained for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge_spec
from edge_spec.bench.prompts import SHIPPED_PROMPTS, pick
from edge_spec.export import export_pair
from edge_spec.export.shipped_recipes import find_pair_recipe
from edge_spec.prompt_file import read_questions

RECIPE = "smollm2-135m"
MOST_BYTES = 20_000_000
# Of the tokens that stand first in a draft, the share that is to be right on the prompts of the bench; 0.40 are.
LEAST_ACCEPTANCE = 0.33


@pytest.fixture(scope="module")
def engine(real_weights: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge_spec.Engine]:
    pair = find_pair_recipe(RECIPE)
    output = tmp_path_factory.mktemp("bundles") / "smollm2-head"
    export_pair(real_weights("smollm2"), None, output, head=pair.head, head_recipe=pair.head_recipe)
    with edge_spec.load(output, context=1024) as loaded:
        yield loaded


def test_the_head_comes_with_the_recipe_and_is_small() -> None:
    head = find_pair_recipe(RECIPE).head
    assert head is not None
    sizes = {file.name: file.stat().st_size for file in Path(head).iterdir()}
    assert set(sizes) == {"config.json", "model.safetensors"}
    assert sum(sizes.values()) < MOST_BYTES


def test_the_head_drafts_what_its_target_says_and_changes_nothing(engine: edge_spec.Engine) -> None:
    drafted = accepted = 0
    for question in pick(read_questions(SHIPPED_PROMPTS), per_category=3):
        plain = engine.chat(question.opening, speculation="off", max_new_tokens=64)
        helped = engine.chat(question.opening, speculation="head", max_draft=3, max_new_tokens=64)
        assert helped.token_ids == plain.token_ids
        drafted += helped.statistics.drafted_by_position[0]
        accepted += helped.statistics.accepted_by_position[0]
    assert accepted / drafted > LEAST_ACCEPTANCE
