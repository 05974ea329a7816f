"""Penalties, bias, an app's processors and masks: each row on its own history, and the same however it is drafted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edge_spec.errors import LogitsError, NoTokenLeftError, RequestError
from edge_spec.runtime.history import History, chain_paths, tree_paths
from edge_spec.runtime.logits_processors import LogitsPipeline, ProcessedRows
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from reference_decoder import law_of, penalized

VOCAB = 12
INF = np.inf

tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=20)
rows_of_logits = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).normal(0, 3, (8, VOCAB)).astype(np.float32)
)


def sinks_what_the_last_token_says(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """Pure, in place, and different for every history."""
    logits[sum(token_ids) % len(logits)] -= 1.5 + len(token_ids) % 3
    return logits


def params_of_any_request() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 1.1, 0.7, 2.0]),
        presence_penalty=st.sampled_from([0.0, 0.6, -1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
        logit_bias=st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=3),
        allowed_token_ids=st.one_of(st.none(), st.sets(tokens, min_size=4)),
        banned_token_ids=st.sets(tokens, max_size=3),
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    drafted = draw(st.lists(tokens, max_size=7))
    return drafted, [draw(st.integers(-1, node - 1)) for node in range(len(drafted))]


@settings(max_examples=300, deadline=None)
@given(rows_of_logits, texts, texts, trees(), params_of_any_request(), st.booleans())
def test_a_drafted_row_has_the_bits_it_would_have_if_its_path_were_already_emitted(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    tree: tuple[list[int], list[int]],
    params: SamplingParams,
    own: bool,
) -> None:
    processors = [sinks_what_the_last_token_says] if own else []
    pipeline = LogitsPipeline(params, processors)
    paths = tree_paths(*tree)
    logits = logits[: len(paths)]
    given_bits = logits.copy()
    block = pipeline.process(logits, History([*prompt, *output], len(prompt)), paths)
    rows = ProcessedRows(pipeline, logits, History([*prompt, *output], len(prompt)), paths)
    for row in reversed(range(len(paths))):
        emitted = History([*prompt, *output, *paths[row]], len(prompt))
        if not reachable(params, paths[row]):  # whatever it says, no rule will read it
            assert np.array_equal(block[row], logits[row])
            continue
        alone = pipeline.process(logits[row : row + 1], emitted, [()])[0]
        assert np.array_equal(block[row], alone)
        assert np.array_equal(rows[row], alone)
    assert np.array_equal(logits, given_bits)


def reachable(params: SamplingParams, path: Sequence[int]) -> bool:
    excluded = set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        excluded |= set(range(VOCAB)) - set(params.allowed_token_ids)
    return not excluded & set(path)


@settings(max_examples=300, deadline=None)
@given(rows_of_logits, texts, texts, texts.map(lambda path: path[:7]), params_of_any_request())
def test_penalties_and_bias_equal_the_naive_formulas_bit_for_bit(
    logits: np.ndarray, prompt: list[int], output: list[int], path: list[int], params: SamplingParams
) -> None:
    paths = chain_paths(path)
    logits = logits[: len(paths)]
    history = History([*prompt, *output], len(prompt))
    processed = LogitsPipeline(params).process(logits, history, paths)
    for row, drafted in enumerate(paths):
        if not reachable(params, drafted):
            break
        expected = penalized(
            list(logits[row]),
            prompt,
            [*output, *drafted],
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        for token, bias in params.logit_bias:
            expected[token] += np.float32(bias)
        for token in range(VOCAB):
            if not reachable(params, (token,)):
                expected[token] = np.float32(-INF)
        assert np.array_equal(processed[row], expected)


@settings(deadline=None)
@given(rows_of_logits, st.lists(tokens, min_size=1, max_size=20), texts, texts, st.sampled_from([0.5, 1.1, 1.3, 3.0]))
def test_repetition_penalty_is_that_of_transformers(
    logits: np.ndarray, prompt: list[int], output: list[int], path: list[int], penalty: float
) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    paths = chain_paths(path[:7])
    ours = LogitsPipeline(SamplingParams(repetition_penalty=penalty)).process(
        logits[: len(paths)], History([*prompt, *output], len(prompt)), paths
    )
    for row, drafted in enumerate(paths):
        ids = torch.tensor([[*prompt, *output, *drafted]])
        expected = theirs(ids, torch.tensor(logits[row : row + 1]))[0].numpy()
        np.testing.assert_allclose(ours[row], expected, rtol=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    rows_of_logits,
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 5, VOCAB, VOCAB + 100]),
    st.sampled_from([0.05, 0.3, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_temperature_and_filters_are_those_of_transformers(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(all(law_of(list(row), temperature, top_k, top_p, min_p)[1] > 1e-5 for row in logits))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros((len(logits), 1), dtype=torch.long), torch.tensor(logits)).softmax(-1).numpy()
    ours = probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert np.array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=1e-9)


def test_presence_and_frequency_look_at_the_output_alone_and_repetition_at_the_prompt_too() -> None:
    logits = np.array([[4.0, 4.0, 4.0, -4.0]], np.float32)
    history = History([0, 0, 3, 1, 1], prompt_length=3)

    def processed(**penalties: float) -> list[float]:
        return LogitsPipeline(SamplingParams(**penalties)).process(logits, history, [()])[0].tolist()

    assert processed(presence_penalty=0.5) == [4.0, 3.5, 4.0, -4.0]
    assert processed(frequency_penalty=0.5) == [4.0, 3.0, 4.0, -4.0]
    assert processed(repetition_penalty=2.0) == [2.0, 2.0, 4.0, -8.0]
    assert processed(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25) == [2.0, 0.5, 4.0, -8.0]


def test_penalties_see_drafted_tokens() -> None:
    logits = np.zeros((3, 3), np.float32)
    pipeline = LogitsPipeline(SamplingParams(frequency_penalty=1.0))
    processed = pipeline.process(logits, History([0, 2], 1), chain_paths([1, 2]))
    assert processed.tolist() == [[0, 0, -1], [0, -1, -1], [0, -1, -2]]


def test_plain_requests_pass_logits_through_untouched() -> None:
    logits = np.full((2, 4), np.nan, np.float32)  # not even looked at
    pipeline = LogitsPipeline(SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, stop=("x",), logprobs=3))
    assert not pipeline.active
    assert pipeline.process(logits, History([1]), chain_paths([2])) is logits
    assert pipeline.process_row(logits[0], History([1]), ()).base is logits


def test_bias_and_processors_cannot_bring_a_banned_token_back() -> None:
    def insists(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return np.array([50.0, 1.0, 60.0, 0.0])  # float64 is welcome

    for masks in ({"banned_token_ids": [0, 2]}, {"allowed_token_ids": [0, 1, 3], "banned_token_ids": [0]}):
        pipeline = LogitsPipeline(SamplingParams(logit_bias={0: 100}, **masks), [insists])
        processed = pipeline.process(np.zeros((1, 4), np.float32), History([1]), [()])
        assert processed.dtype == np.float32
        assert processed.tolist() == [[-INF, 1.0, -INF, 0.0]]


def test_processors_run_in_order_after_penalties_and_bias_on_each_rows_own_text() -> None:
    seen: list[tuple[list[int], list[float]]] = []

    def records(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append((list(token_ids), logits.tolist()))
        token_ids.append(99)  # its own copy
        return logits

    def adds_one(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits += 1
        return logits

    params = SamplingParams(presence_penalty=1.0, logit_bias={0: 3.0})
    tokens = [2, 1]
    pipeline = LogitsPipeline(params, [adds_one, records, adds_one])
    processed = pipeline.process(np.zeros((2, 3), np.float32), History(tokens, 1), chain_paths([2]))
    assert seen == [([2, 1], [4, 0, 1]), ([2, 1, 2], [4, 0, 0])]
    assert processed.tolist() == [[5, 1, 2], [5, 1, 1]]
    assert tokens == [2, 1]


def test_a_processor_may_keep_what_it_returns() -> None:
    kept = np.array([1.0, 2.0, 3.0], np.float32)
    pipeline = LogitsPipeline(SamplingParams(banned_token_ids=[2]), [lambda token_ids, logits: kept])
    pipeline.process(np.zeros((1, 3), np.float32), History([1]), [()])
    assert kept.tolist() == [1, 2, 3]


@pytest.mark.parametrize("how", ["processor", "ban", "allow", "model"])
def test_no_processor_is_asked_about_a_text_that_is_ruled_out(how: str) -> None:
    """A grammar would not know what to answer, and plain decoding would never have asked."""
    asked: list[list[int]] = []

    def grammar(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        asked.append(list(token_ids))
        assert 2 not in token_ids
        if how == "processor":
            logits[2] = -INF
        return logits

    masks: dict[str, Any] = {"ban": {"banned_token_ids": [2]}, "allow": {"allowed_token_ids": [0, 1, 3]}}.get(how, {})
    logits = np.ones((6, 4), np.float32)
    logits[:, 2] = -INF if how == "model" else 1.0
    #   1 - 2 - 0 - 1     and the sibling 3 of 2
    paths = tree_paths([1, 2, 3, 0, 1], [-1, 0, 0, 1, 3])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
        asked.clear()
        rows = ProcessedRows(LogitsPipeline(SamplingParams(**masks), [grammar]), logits, History([0]), paths)
        assert len(rows) == 6
        for row in order:
            assert np.isfinite(rows[row].max())
        assert sorted(asked) == [[0], [0, 1], [0, 1, 3]]


def test_rows_that_nobody_reads_cost_nothing_and_hide_their_errors() -> None:
    calls: list[int] = []

    def counts(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        calls.append(len(token_ids))
        return logits

    logits = np.zeros((3, 4), np.float32)
    logits[2] = np.nan
    rows = ProcessedRows(LogitsPipeline(SamplingParams(), [counts]), logits, History([3]), chain_paths([1, 2]))
    assert np.array_equal(rows[0], rows[0])
    assert calls == [1]
    with pytest.raises(LogitsError, match="at position 3, the largest logit is nan"):
        rows[2]


@pytest.mark.parametrize("broken", [[0.0, np.nan, 9.0], [0.0, INF, 9.0], [-INF] * 3])
@pytest.mark.parametrize("masked", [False, True])
def test_broken_logits_are_named_by_position_even_where_a_mask_would_hide_them(
    broken: list[float], masked: bool
) -> None:
    params = SamplingParams(banned_token_ids=[1], presence_penalty=0.0 if masked else 0.3)
    logits = np.array([[0, 1, 2], broken], np.float32)
    with pytest.raises(LogitsError, match="at position 5, the largest logit is .* expected a finite number") as raised:
        LogitsPipeline(params).process(logits, History([1, 2, 1, 2]), chain_paths([0]))
    assert (raised.value.row, raised.value.position) == (1, 5)
    assert not isinstance(raised.value, RequestError)


def test_a_step_without_any_token_left_is_a_clear_error_of_the_request() -> None:
    logits = np.array([[0.0, 1.0, -INF]], np.float32)
    cases = [
        LogitsPipeline(SamplingParams(banned_token_ids=[0, 1])),
        LogitsPipeline(SamplingParams(banned_token_ids=[0, 1, 2])),
        LogitsPipeline(SamplingParams(allowed_token_ids=[2])),
        LogitsPipeline(SamplingParams(), [lambda token_ids, logits: np.full_like(logits, -INF)]),
    ]
    for pipeline in cases:
        with pytest.raises(NoTokenLeftError, match="at position 2, no token is left to choose") as raised:
            pipeline.process(logits, History([1, 2]), [()])
        assert isinstance(raised.value, RequestError)
        assert raised.value.row == 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda logits: logits[:-1], r"returned float32 \[3\], expected floating point \[4\]"),
        (lambda logits: logits[None], r"returned float32 \[1, 4\], expected"),
        (lambda logits: logits.astype(np.int64), r"returned int64 \[4\], expected"),
        (lambda logits: None, r"returned object \[\], expected"),
        (lambda logits: logits + np.nan, "returned logits up to nan, expected finite"),
        (lambda logits: logits + INF, "returned logits up to inf, expected finite"),
        (lambda logits: logits.astype(np.float64) + 1e300, r"returned logits up to 1e\+300, expected finite"),
        (lambda logits: {}["x"], r"raised KeyError\('x'\)"),
    ],
)
def test_a_processor_that_answers_nonsense_is_named(answer: Any, problem: str) -> None:
    def my_rule(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return answer(logits)

    pipeline = LogitsPipeline(SamplingParams(), [my_rule])
    with pytest.raises(LogitsError, match=f"at position 3, the logits processor .*my_rule {problem}"):
        pipeline.process(np.zeros((1, 4), np.float32), History([1, 2, 3]), [()])


def test_a_processor_object_is_named_by_its_class() -> None:
    class MyGrammar:
        def __call__(self, token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
            raise RuntimeError("no state")

    for processor in (MyGrammar(), functools.partial(MyGrammar(), strict=True)):
        with pytest.raises(LogitsError, match="logits processor .*(MyGrammar|partial) raised") as raised:
            LogitsPipeline(SamplingParams(), [processor]).process(np.zeros((1, 4), np.float32), History([1]), [()])
        assert isinstance(raised.value.__cause__, RuntimeError | TypeError)


@pytest.mark.parametrize("given_processors", [5, [5], [sinks_what_the_last_token_says, None]])
def test_processors_that_cannot_be_called_are_refused_at_once(given_processors: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors (is|holds)"):
        LogitsPipeline(SamplingParams(), given_processors)


def test_an_error_can_be_told_where_it_happened() -> None:
    error = NoTokenLeftError("nothing is left", 3)
    assert str(error) == "at row 3, nothing is left"
    moved = error.at(17)
    assert type(moved) is NoTokenLeftError
    assert (str(moved), moved.row, moved.position) == ("at position 17, nothing is left", 3, 17)
