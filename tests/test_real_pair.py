"""The whole way on real weights: export, load, generate, and the same text whoever drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.bench.prompts import SHIPPED_PROMPTS, pick
from edge_spec.bundle import open_bundle
from edge_spec.export import export_pair
from edge_spec.prompt_file import read_questions
from edge_spec.runtime.model import Model

RealWeights = Callable[[str], Path]

NEW_TOKENS = 96
# One of each category, and code and lists, which draft well.
PROMPTS = (
    "Write a Python function that merges two sorted lists into one sorted list.",
    *(question.opening[0]["content"] for question in pick(read_questions(SHIPPED_PROMPTS), per_category=1)),
    "Fix the bug and return the whole code:\n```python\ndef average(values):\n    total = 0\n    for value in values:\n"
    "        total += value\n    return total / len(value)\n```",
    "Repeat this list in reverse order, one item per line: apples, bread, candles, dates, eggs, flour.",
    "Write a SQL query that lists the five customers with the highest total of orders in 2023.",
)


@pytest.fixture(scope="module")
def smollm2(smollm2_bundle: Path) -> Iterator[edge_spec.Engine]:
    with edge_spec.load(smollm2_bundle, context=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen_bundle(real_weights: RealWeights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "qwen"
    export_pair(real_weights("qwen-target"), real_weights("qwen-draft"), output)
    return output


@pytest.fixture(scope="module")
def qwen(qwen_bundle: Path) -> Iterator[edge_spec.Engine]:
    with edge_spec.load(qwen_bundle, context=1024) as engine:
        yield engine


def assert_every_drafter_gives_the_plain_text(engine: edge_spec.Engine, prompts: Sequence[str]) -> None:
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        plain = engine.chat(messages, speculation="off", max_new_tokens=NEW_TOKENS)
        assert plain.statistics.rounds == plain.statistics.new_tokens
        ways: list[tuple[str, int | None]] = [("auto", None), ("composite", 8)]
        if "model" in engine.drafters:
            ways.append(("model", 4))
        for drafter, max_draft in ways:
            drafted = engine.chat(messages, speculation=drafter, max_draft=max_draft, max_new_tokens=NEW_TOKENS)
            assert drafted.token_ids == plain.token_ids, f"{drafter} changed the answer to {prompt!r}"
            assert drafted.text == plain.text


def assert_a_seed_decides_the_text(engine: edge_spec.Engine, prompts: Sequence[str], new_tokens: int) -> None:
    """Sampled text is the same with and without speculation, whoever drafts and however much."""
    if engine.exactness != "bitwise":
        pytest.skip(f"on this processor rows depend on their companions: exactness is only {engine.exactness}")
    luck = random.Random(0)
    for seed, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        temperature = (0.7, 1.0)[seed % 2]
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "seed": seed,
            "max_new_tokens": new_tokens,
        }
        plain = engine.chat(messages, speculation="off", **sampling)
        ways = [("auto", None), (luck.choice(engine.drafters), luck.randint(1, 8))]
        for drafter, max_draft in ways:
            drafted = engine.chat(messages, speculation=drafter, max_draft=max_draft, **sampling)
            assert drafted.token_ids == plain.token_ids, (drafter, max_draft, temperature, prompt)
            assert drafted.text == plain.text


@pytest.mark.timeout(1200)
def test_smollm2_samples_the_same_text_with_and_without_drafting(smollm2: edge_spec.Engine) -> None:
    assert_a_seed_decides_the_text(smollm2, PROMPTS, new_tokens=48)


@pytest.mark.timeout(2400)
def test_the_qwen_pair_samples_the_same_text_with_and_without_drafting(qwen: edge_spec.Engine) -> None:
    assert_a_seed_decides_the_text(qwen, PROMPTS[::2], new_tokens=24)


@pytest.mark.timeout(1200)
def test_smollm2_says_the_same_with_and_without_drafting(smollm2: edge_spec.Engine) -> None:
    assert_every_drafter_gives_the_plain_text(smollm2, PROMPTS)


@pytest.mark.timeout(2400)
def test_the_qwen_pair_says_the_same_with_and_without_drafting(qwen: edge_spec.Engine) -> None:
    assert "model" in qwen.drafters
    assert_every_drafter_gives_the_plain_text(qwen, PROMPTS[1::2])


PERSON = edge_spec.Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "full_name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["full_name", "age", "favourite_colours"],
        "additionalProperties": False,
    }
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
def test_smollm2_obeys_a_schema_with_and_without_drafting(smollm2: edge_spec.Engine, sampling: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Describe Bob Hope, who is 31 and likes red and blue, as JSON."}]
    options: dict[str, Any] = {"grammar": PERSON, "max_new_tokens": NEW_TOKENS, **sampling}
    plain = smollm2.chat(messages, speculation="off", **options)
    assert plain.finish_reason == "stop"
    assert list(json.loads(plain.text)) == ["full_name", "age", "favourite_colours"]
    for ways in ({}, {"speculation": "grammar"}, {"speculation": "composite", "max_draft": 6}):
        drafted = smollm2.chat(messages, **options, **ways)
        if smollm2.exactness == "bitwise" or not sampling:
            assert drafted.token_ids == plain.token_ids
        assert drafted.statistics.accepted_by_drafter["grammar"] > 0


@pytest.mark.timeout(2400)
def test_texts_of_the_qwen_pair_that_take_turns_are_those_of_each_alone(qwen: edge_spec.Engine) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Name three rivers and say where they end.", {"max_new_tokens": 24}),
        ("Write a Python function that adds two numbers.", {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}),
        ("Count from one to ten in French.", {"max_new_tokens": 24}),
    ]
    chats = [([{"role": "user", "content": prompt}], options) for prompt, options in requests]
    plain = [qwen.chat(messages, speculation="off", **options) for messages, options in chats]
    last: list[edge_spec.Chunk | None] = [None] * len(chats)
    for chunks in zip_longest(*(qwen.stream(messages, **options) for messages, options in chats)):
        last = [chunk or before for chunk, before in zip(chunks, last, strict=True)]
    for chunk, alone in zip(last, plain, strict=True):
        assert chunk is not None and chunk.completion is not None
        assert chunk.completion.token_ids == alone.token_ids


def test_the_qwen_draft_is_worth_having(qwen: edge_spec.Engine) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    completion = qwen.chat(messages, speculation="model", max_draft=4, max_new_tokens=NEW_TOKENS)
    assert completion.statistics.mean_accepted_length > 2
    assert "def " in completion.text


@pytest.mark.timeout(1200)
def test_rows_of_the_real_target_do_not_depend_on_their_companions(qwen_bundle: Path) -> None:
    bundle = open_bundle(qwen_bundle, verify=False)
    target = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], context=256, exact_rows=True)
    tokens = np.random.default_rng(0).integers(0, bundle.manifest.vocab_size, 120).tolist()
    target.prefill(tokens[:88])
    expected = target.forward(tokens[88:], range(32)).copy()
    for width in (1, 2, 3, 5, 9, 17):
        target.cache.rollback(88)
        for start in range(0, 32, width):
            rows = tokens[88 + start : 88 + min(start + width, 32)]
            logits = target.forward(rows, range(len(rows)))
            assert np.array_equal(logits, expected[start : start + len(rows)]), f"width {width}, row {start}"


def test_the_export_is_close_to_float32(qwen_bundle: Path) -> None:
    manifest = open_bundle(qwen_bundle, verify=False).manifest
    assert manifest.target.quality is not None and manifest.target.quality.mean_kl < 0.1
    assert manifest.draft is not None and manifest.draft.quality is not None
    assert manifest.draft.quality.mean_kl < 0.15
