"""Faults that other implementations of speculative decoding have had, one test each.

Shown elsewhere: end tokens, stop strings, length caps and the end of the context inside a block, and statistics that
end with a stop string (test_engine); stop strings across blocks (test_output); parameters out of range, ``top_p = 0``
among them (test_sampling_params); penalties and noise in distribution (test_loop_statistics).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec import Completion, Engine
from edge_spec.bundle import open_bundle
from edge_spec.errors import LogitsError, RequestError
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.model import Model
from edge_spec.runtime.output import Output
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.verification import RULES
from row_independence import require_bitwise_kernels
from stub_model import Pausing, StubDrafter, StubModel, context_of, rounds_of
from test_reference_decoder import EOS, Letters, hash_of_prefix

Bundles = Callable[..., Path]

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
SPECULATIONS = ("off", "model", "lookup")
# Lookup finds what repeats.
PROMPT = [3, 9, 4, 3, 9, 4, 3, 9]

everyone = pytest.mark.parametrize("speculation", SPECULATIONS)
every_rule = pytest.mark.parametrize("rule", RULES)


@functools.cache
def shared(path: Path) -> Engine:
    return edge_spec.load(path, threads=1)


def letters(draft: str, **more: Any) -> dict[str, Any]:
    return {"recipe": "w8a8", "draft": draft, "letters": LETTERS, "vocab_size": 32, "eos": None, **more}


@pytest.fixture
def engine(tiny_bundle: Bundles) -> Engine:
    """A close pair; its logits have 32 columns and its vocabulary 29 ids."""
    return shared(tiny_bundle(**letters("close")))


def counts(completion: Completion) -> tuple[Any, ...]:
    statistics = completion.statistics
    return completion.token_ids, completion.text, statistics.rounds, statistics.drafted, statistics.accepted


# The text depends on who drafts


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.3, "top_k": 12, "presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {3: 4.0, 9: 3.0}, "banned_token_ids": [4]},
    ],
)
def test_the_same_seed_gives_the_same_text_with_speculation_on(engine: Engine, options: dict[str, Any]) -> None:
    require_bitwise_kernels()
    for seed in range(5):
        plain = engine.generate(PROMPT, max_new_tokens=40, seed=seed, speculation="off", **options)
        for speculation, max_draft in (("model", 1), ("model", 7), ("lookup", 5)):
            drafted = engine.generate(
                PROMPT, max_new_tokens=40, seed=seed, speculation=speculation, max_draft=max_draft, **options
            )
            assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.4}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_penalties_see_the_tokens_drafted_before_them(tiny_bundle: Bundles, penalty: dict[str, float]) -> None:
    require_bitwise_kernels()
    twin = shared(tiny_bundle(**letters("same") | {"recipe": "fp32"}))
    plain = twin.generate(PROMPT, max_new_tokens=40, speculation="off", **penalty)
    drafted = twin.generate(PROMPT, max_new_tokens=40, speculation="model", max_draft=6, **penalty)
    assert drafted.token_ids == plain.token_ids != twin.generate(PROMPT, max_new_tokens=40).token_ids
    # The draft is the target itself, and penalizes its own drafts alike: everything is kept.
    assert drafted.statistics.acceptance_rate == 1.0


@everyone
def test_a_second_request_sees_nothing_of_the_first(tiny_bundle: Bundles, speculation: str) -> None:
    path = tiny_bundle(**letters("close"))
    options: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.7,
        "max_new_tokens": 40,
        "speculation": speculation,
        "max_draft": 4,
    }
    used = edge_spec.load(path, threads=1)
    # The first text begins like the second, is longer, was stopped inside a block and penalized other tokens.
    used.generate([*PROMPT, 1, 2, 3] * 3, **{**options, "max_new_tokens": 60, "seed": 6, "stop": ["e", "a"]})
    assert counts(used.generate(PROMPT, **options)) == counts(
        edge_spec.load(path, threads=1).generate(PROMPT, **options)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_resumes_after_a_pause_without_a_stale_cache(temperature: float) -> None:
    logits_of = hash_of_prefix()
    draft = StubModel(logits_of)
    pauses = iter([3, 3, 0, 0, 0, 4, 0, 1, 0, 0, 5, *[4] * 99])
    drafter = Pausing(ModelDrafter(draft), lambda: next(pauses))  # type: ignore[arg-type]
    context = context_of([1, 2, 3], SamplingParams(temperature=temperature, seed=1))
    drafted = []
    for round_ in rounds_of(StubModel(logits_of), drafter, context, 60, 5):
        # The draft says what the target says as long as it has read the same text.
        assert round_.accepted == round_.drafted
        drafted.append(round_.drafted)
    assert drafted[:12] == [0, 3, 3, 0, 0, 0, 4, 0, 1, 0, 0, 5]


# Where a text ends


@every_rule
def test_a_stop_string_may_begin_in_one_block_and_end_in_the_next(rule: str) -> None:
    """Blocks end between any two letters of it."""
    text = [0, 1, 2, 3, 4, 5, 6, 7] * 3
    target_text = [9, *text]

    def logits_of(history: Sequence[int]) -> np.ndarray:
        logits = np.zeros(11, np.float32)
        logits[target_text[len(history)]] = 50
        return logits

    params = SamplingParams(stop="defg", temperature=1.0, seed=0)
    for block in range(5):
        output = Output(Letters(), params, [EOS], 20)  # type: ignore[arg-type]
        drafter = StubDrafter(lambda history, budget: target_text[len(history) : len(history) + budget])
        pieces = []
        for round_ in rounds_of(StubModel(logits_of), drafter, context_of([9], params, rule), 21, block, rule):
            assert round_.accepted == round_.drafted
            pieces += output.push(round_.tokens)[0]
            if output.finish_reason is not None:
                break
        assert output.text == "".join(pieces) == "abc"
        assert output.finish_reason == "stop" and output.token_ids == text[:7]


@every_rule
@pytest.mark.parametrize("speculation", ["model", "lookup"])
def test_statistics_end_with_the_end_token(tiny_bundle: Bundles, rule: str, speculation: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 60,
        "speculation": speculation,
        "max_draft": 6,
        "verification": rule,
        "temperature": 0.5,
        "seed": 3,
    }
    twin = shared(tiny_bundle(**letters("same")))
    whole = twin.generate(PROMPT, **options)
    for end in {whole.token_ids.index(token) for token in whole.token_ids}:
        stopped = twin.generate(PROMPT, stop_token_ids=[whole.token_ids[end]], **options)
        statistics = stopped.statistics
        assert stopped.token_ids == whole.token_ids[: end + 1] and stopped.finish_reason == "stop"
        assert statistics.new_tokens == end + 1
        # Each round but perhaps the last adds one token of the target's own.
        assert statistics.rounds + statistics.accepted - statistics.new_tokens in (0, 1)
        assert statistics.accepted <= statistics.drafted == sum(statistics.drafted_by_position)


@every_rule
@pytest.mark.parametrize("speculation", ["model", "lookup"])
def test_no_cache_holds_tokens_behind_the_stop(tiny_bundle: Bundles, rule: str, speculation: str) -> None:
    twin = shared(tiny_bundle(**letters("same")))
    for end in range(1, 15):
        whole = twin.generate(PROMPT, max_new_tokens=15, seed=end, temperature=0.5)
        completion = twin.generate(
            PROMPT,
            seed=end,
            temperature=0.5,
            verification=rule,
            speculation=speculation,
            max_draft=7,
            stop_token_ids=[whole.token_ids[end]],
            max_new_tokens=40,
        )
        length = len(PROMPT) + len(completion.token_ids)
        assert twin._target.cache.length <= length
        drafter: Any = twin._drafters["model"]
        if speculation == "model":
            assert drafter._read._model.cache.length <= length


@every_rule
@everyone
def test_the_context_ends_inside_a_block_of_any_rule(tiny_bundle: Bundles, rule: str, speculation: str) -> None:
    with edge_spec.load(tiny_bundle(**letters("close")), context=24, threads=1) as engine:
        for size in (1, 20, 21, 22, 23):
            completion = engine.generate(
                (PROMPT * 3)[:size],
                max_new_tokens=100,
                temperature=0.8,
                seed=size,
                verification=rule,
                speculation=speculation,
                max_draft=6,
            )
            assert len(completion.token_ids) == 24 - size
            assert completion.finish_reason == "length"


# Log-probabilities and the vocabulary


@every_rule
@everyone
def test_log_probabilities_are_the_targets_own(tiny_bundle: Bundles, rule: str, speculation: str) -> None:
    path = tiny_bundle(**letters("close"))
    completion = shared(path).generate(
        PROMPT,
        max_new_tokens=25,
        temperature=0.9,
        top_k=4,
        presence_penalty=0.5,
        seed=2,
        logprobs=3,
        verification=rule,
        speculation=speculation,
        max_draft=5,
    )
    bundle = open_bundle(path)
    model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 64, exact_rows=True, threads=1)
    text = [*PROMPT, *completion.token_ids]
    logits = model.forward(text, range(len(PROMPT) - 1, len(text) - 1)).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert completion.logprobs is not None and len(completion.logprobs) == 25
    for token, at_token, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        assert at_token.token_id == token
        assert at_token.logprob == pytest.approx(row[token], abs=1e-3) and at_token.logprob < 0
        assert [best for best, _ in at_token.top] == np.argsort(-row, kind="stable")[:3].tolist()


@every_rule
@everyone
def test_padding_ids_are_never_sampled(engine: Engine, rule: str, speculation: str) -> None:
    completion = engine.generate(
        PROMPT,
        max_new_tokens=200,
        temperature=1e6,
        seed=1,
        logprobs=40,
        verification=rule,
        speculation=speculation,
    )
    vocabulary = engine.manifest.vocab_size
    assert engine.manifest.target.architecture.logits_size > vocabulary == len(LETTERS) + 1
    assert set(completion.token_ids) == set(range(vocabulary))
    assert completion.logprobs is not None
    assert {len(at_token.top) for at_token in completion.logprobs} == {vocabulary}
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        with pytest.raises(RequestError, match=f"{name} holds token id {vocabulary}"):
            engine.generate(PROMPT, **{name: {vocabulary: 1.0} if name == "logit_bias" else [vocabulary]})


# Edges of a request


@everyone
def test_a_prompt_of_one_token(engine: Engine, speculation: str) -> None:
    require_bitwise_kernels()
    for token in range(engine.manifest.vocab_size):
        plain = engine.generate([token], max_new_tokens=10, speculation="off")
        assert engine.generate([token], max_new_tokens=10, speculation=speculation).token_ids == plain.token_ids
        assert len(plain.token_ids) == 10


@everyone
def test_a_prompt_that_ends_with_an_end_token_is_continued(tiny_bundle: Bundles, speculation: str) -> None:
    free = shared(tiny_bundle(**letters("close")))
    ending = shared(tiny_bundle(**letters("close", eos=5)))
    for prompt in ([5], [3, 5], [5, 5, 5, 5]):
        whole = free.generate(prompt, max_new_tokens=30, speculation=speculation).token_ids
        end = whole.index(5) + 1 if 5 in whole else 30
        completion = ending.generate(prompt, max_new_tokens=30, speculation=speculation)
        assert completion.token_ids == whole[:end]


@everyone
def test_no_token_and_one_token(engine: Engine, speculation: str) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1, "speculation": speculation, "logprobs": 1}
    none = engine.generate(PROMPT, max_new_tokens=0, **options)
    assert (none.token_ids, none.text, none.finish_reason, none.logprobs) == ((), "", "length", ())
    assert none.statistics.rounds == none.statistics.drafted == 0
    one = engine.generate(PROMPT, max_new_tokens=1, **options)
    assert one.token_ids == engine.generate(PROMPT, max_new_tokens=9, **options).token_ids[:1]
    assert (one.finish_reason, one.statistics.rounds, one.statistics.drafted) == ("length", 1, 0)
    assert one.logprobs is not None and len(one.logprobs) == 1


@every_rule
@everyone
def test_a_temperature_next_to_zero_is_greedy(engine: Engine, rule: str, speculation: str) -> None:
    require_bitwise_kernels()
    greedy = engine.generate(PROMPT, max_new_tokens=40, speculation="off").token_ids
    cold: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1e-6, "verification": rule, "speculation": speculation}
    assert engine.generate(PROMPT, seed=8, **cold).token_ids == greedy


@every_rule
@everyone
def test_filters_that_keep_everything_change_nothing(engine: Engine, rule: str, speculation: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.1, "seed": 4}
    options |= {"verification": rule, "speculation": speculation, "max_draft": 4}
    plain = engine.generate(PROMPT, **options).token_ids
    for filters in ({"top_k": 29}, {"top_k": 30}, {"top_k": 10**9}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}):
        assert engine.generate(PROMPT, **filters, **options).token_ids == plain
    with pytest.raises(RequestError, match="top_p is 0"):
        engine.generate(PROMPT, top_p=0, **options)


# A model that breaks down


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@every_rule
@everyone
def test_broken_logits_name_the_step(
    tiny_bundle: Bundles,
    monkeypatch: pytest.MonkeyPatch,
    broken: float,
    temperature: float,
    rule: str,
    speculation: str,
) -> None:
    engine = shared(tiny_bundle(**letters("same")))
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_new_tokens": 20, "max_draft": 5}
    options |= {"verification": rule, "speculation": speculation}
    whole = engine.generate(PROMPT, **options).token_ids
    forward = Model.forward
    position = len(PROMPT) + 12

    def breaking(self: Model, token_ids: Sequence[int], logit_rows: Sequence[int], *more: Any) -> Any:
        past = self.cache.length
        logits = forward(self, token_ids, logit_rows, *more)
        if self is engine._target:
            for index, row in enumerate(logit_rows):
                if past + row + 1 >= position:
                    logits[index] = broken
        return logits

    monkeypatch.setattr(Model, "forward", breaking)
    emitted: list[int] = []

    def read() -> None:
        for chunk in engine.stream(PROMPT, **options):
            emitted.extend(chunk.token_ids)

    with pytest.raises(LogitsError, match=f"at position {position}, the largest logit is {broken}"):
        read()
    # Nothing that could be said before is lost, wherever in a block the model broke down.
    assert len(emitted) == 12
    if temperature == 0.0 or rule == "coupled":
        assert tuple(emitted) == whole[:12]
    monkeypatch.undo()
    assert engine.generate(PROMPT, **options).token_ids == whole


@every_rule
def test_a_token_that_leads_into_a_breakdown_is_as_frequent_as_it_should_be(rule: str) -> None:
    """After token 2 nothing can be computed. To forget the draft token that leads there would emit it too seldom."""
    law = np.array([0.5, 0.2, 0.3])
    logits = np.log(law).astype(np.float32)

    def target_logits(history: Sequence[int]) -> np.ndarray:
        return np.full(3, np.nan, np.float32) if history[-1] == 2 else logits

    seen: list[int] = []
    for seed in range(2000):
        context = context_of([0], SamplingParams(temperature=1.0, seed=seed), rule)
        drafter: Any = ModelDrafter(StubModel(lambda history: logits))  # type: ignore[arg-type]
        with suppress(LogitsError):
            list(rounds_of(StubModel(target_logits), drafter, context, 6, 3, rule))
        if context.tokens[1] != 2:  # the first round drafts nothing
            seen.append(context.tokens[2])
    share = seen.count(2) / len(seen)
    assert abs(share - law[2]) < 5 * (law[2] * (1 - law[2]) / len(seen)) ** 0.5


@every_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_breakdown_behind_a_rejected_draft_token_is_not_seen(rule: str, temperature: float) -> None:
    """After token 2 the model breaks down; the text never goes there, though every draft does."""

    def logits_of(history: Sequence[int]) -> np.ndarray:
        if history[-1] == 2:
            return np.full(3, np.nan, np.float32)
        return np.array([1, 0, -np.inf], np.float32)

    context = context_of([0], SamplingParams(temperature=temperature, seed=3), rule)
    drafter = StubDrafter(lambda history, budget: [0, 2, 0, 1][:budget])
    rounds = list(rounds_of(StubModel(logits_of), drafter, context, 30, 4, rule))
    assert len(context.tokens) == 30 and 2 not in context.tokens
    assert sum(round_.drafted for round_ in rounds) > 0
