"""An engine whose head fills blocks: the text is the target's own, whoever proposes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_heads import block_config, block_tensors, dspark_tensors
from drafted_text import require_that_conversations_go_on, require_that_rules_hold, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_spec
from edge_spec import Engine
from edge_spec.export.add_head import add_head
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.verification import RULES
from head_checkpoints import save_head
from tiny_models import SIZES

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
VOCABULARY, LAYERS, HIDDEN, RANK = 32, 3, SIZES["hidden_size"], 4
IDS = [0, 1]
PROMPT = [3, 9, 4, 3, 9, 4, 1, 1, 2]

drafting = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def path(
    request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tiny_bundle(recipe="w8a8", letters=LETTERS, vocab_size=VOCABULARY, num_hidden_layers=LAYERS, eos=None)
    folder = tmp_path_factory.mktemp("head")
    config, tensors = block_config(request.param, HIDDEN, VOCABULARY, 2, IDS), block_tensors(HIDDEN, len(IDS), 2)
    if request.param == "dspark":
        tensors |= dspark_tensors(HIDDEN, VOCABULARY, RANK)
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return add_head(target, save_head(folder / "checkpoint", config, tensors), output=folder / "bundle").path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with edge_spec.load(path, threads=1, conversations=8) as loaded:
        yield loaded


@drafting
@given(
    prompt=st.lists(st.integers(0, 28), min_size=1, max_size=90),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
    max_draft=st.sampled_from([None, 1, 3, 6]),
    tree=st.booleans(),
    name=st.sampled_from(["head", "auto", "composite"]),
)
def test_the_text_is_that_of_plain_decoding(
    engine: Engine, prompt: list[int], temperature: float, seed: int, max_draft: int | None, tree: bool, name: str
) -> None:
    request: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": seed}
    plain = engine.generate(prompt, speculation="off", **request)
    assert same(engine.generate(prompt, speculation=name, max_draft=max_draft, tree=tree, **request), plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"top_k": 4, "presence_penalty": 0.7, "banned_token_ids": [1, 2, 3]}])
def test_every_rule_takes_what_a_head_proposes(engine: Engine, rule: str, options: dict[str, Any]) -> None:
    require_that_rules_hold(engine, PROMPT, rule, options)


def test_a_conversation_goes_on_with_a_head(engine: Engine) -> None:
    require_that_conversations_go_on(engine)


def test_a_head_that_fails_costs_speed_and_not_the_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edge_spec.load(path, threads=1) as loaded:
        plain = loaded.generate(PROMPT, max_new_tokens=20, speculation="off")
        whole = BlockHead.draft

        def broken(self: BlockHead, *arguments: Any) -> Any:
            logits, scores = whole(self, *arguments)
            return np.full_like(logits, np.nan), scores

        monkeypatch.setattr(BlockHead, "draft", broken)
        assert same(loaded.generate(PROMPT, max_new_tokens=20, speculation="head", max_draft=3), plain)
