"""Summaries of benchmark records, against figures computed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_records import answer
from edge_spec.bench.summary import speedup, summarize


def test_speedups_divide_sums_not_the_ratios_of_single_prompts() -> None:
    summary = summarize(
        [
            answer("off", 1, decode=8.0, tokens=80),
            answer("lookup", 1, decode=2.0, tokens=80),
            answer("off", 2, decode=1.0),
            answer("lookup", 2, decode=1.0),
        ]
    )
    figures = summary.overall["lookup"]
    assert figures.decode_speedup is not None and figures.request_speedup is not None
    assert figures.decode_speedup.ratio == pytest.approx(9 / 3)
    assert figures.request_speedup.ratio == pytest.approx((9 + 2 * 0.75) / (3 + 2 * 0.75))
    assert summary.overall["off"].decode_speedup is None


def test_texts_of_different_lengths_are_compared_by_time_per_token() -> None:
    answers = [answer("off", decode=4.0, tokens=20), answer("lookup", decode=1.0), answer("baseline", decode=6.0)]
    figures = summarize(answers).overall
    assert figures["lookup"].decode_speedup is not None
    assert figures["lookup"].decode_speedup.ratio == pytest.approx(0.2 / 0.1)
    assert figures["lookup"].decode_speedup_over_baseline is not None
    assert figures["lookup"].decode_speedup_over_baseline.ratio == pytest.approx(0.6 / 0.1)
    assert figures["off"].decode_speedup_over_baseline is not None
    assert figures["off"].decode_speedup_over_baseline.ratio == pytest.approx(0.6 / 0.2)
    assert figures["baseline"].decode_speedup_over_baseline is None


def test_counts_and_times_are_added_up() -> None:
    first = {"rounds": 4, "new_tokens": 12, "drafted": 10, "accepted": 8}
    first_parts = {"draft_seconds": 1.0, "verify_seconds": 6.0, "overhead_seconds": 1.0}
    second_parts = {"draft_seconds": 1.0, "verify_seconds": 10.0, "overhead_seconds": 1.0}
    answers = [
        answer("off", 1),
        answer("off", 2, ttft_seconds=1.5),
        answer("lookup", 1, drafted_by_position=[4, 3], accepted_by_position=[3, 1], **first, **first_parts),
        answer(
            "lookup",
            2,
            identical=False,
            rounds=6,
            new_tokens=8,
            drafted=6,
            accepted=0,
            drafted_by_position=[4],
            accepted_by_position=[3],
            **second_parts,
        ),
    ]
    figures = summarize(answers).overall["lookup"]
    assert (figures.questions, figures.answers, figures.identical, figures.new_tokens) == (2, 2, 1, 20)
    assert figures.mean_accepted_length == pytest.approx(20 / 10)
    assert figures.acceptance_rate == pytest.approx(8 / 16)
    assert figures.acceptance_by_position == pytest.approx([6 / 8, 1 / 3])
    assert (figures.draft_share, figures.verify_share, figures.overhead_share) == pytest.approx((0.1, 0.8, 0.1))
    assert figures.tokens_per_second == pytest.approx((11 + 7) / 2.0)
    assert summarize(answers).overall["off"].ttft_seconds == pytest.approx(1.0)


def test_categories_are_summarized_apart() -> None:
    answers = [
        answer(mode, line, category=category, decode=decode)
        for line, category, costs in ((1, "qa", (2.0, 1.0)), (2, "rag", (3.0, 1.0)))
        for mode, decode in zip(("off", "lookup"), costs, strict=True)
    ]
    summary = summarize(answers)
    ratios = {name: modes["lookup"].decode_speedup for name, modes in summary.categories.items()}
    assert {name: ratio and ratio.ratio for name, ratio in ratios.items()} == {"qa": 2.0, "rag": 3.0}
    assert summary.overall["lookup"].decode_speedup is not None
    assert summary.overall["lookup"].decode_speedup.ratio == pytest.approx(2.5)


def test_the_interval_is_that_of_all_resamples() -> None:
    base = np.array([[4.0, 10], [3.0, 10], [9.0, 10], [5.0, 10]])
    other = np.array([[2.0, 10], [3.0, 10], [3.0, 10], [4.0, 10]])
    every = [base[list(draw), 0].sum() / other[list(draw), 0].sum() for draw in itertools.product(range(4), repeat=4)]
    result = speedup(base, other)
    assert result is not None and result.low is not None and result.high is not None
    assert result.ratio == pytest.approx(21 / 12)
    low, high = np.percentile(every, (2.5, 97.5))
    assert (result.low, result.high) == pytest.approx((low, high), rel=0.05)


def test_turns_and_repetitions_of_a_question_are_drawn_together() -> None:
    single = [answer(mode, line, decode=line * (1.0 + (mode == "off"))) for line in (1, 2, 3) for mode in ("off", "a")]
    twice = [*single, *(answer(one.mode, one.line, decode=one.wall_seconds - 0.75, repetition=1) for one in single)]
    assert summarize(twice).overall["a"].decode_speedup == summarize(single).overall["a"].decode_speedup
    assert (summarize(twice).overall["a"].questions, summarize(twice).overall["a"].answers) == (3, 6)


def test_a_single_question_has_no_interval() -> None:
    result = speedup(np.array([[4.0, 10]]), np.array([[2.0, 10]]))
    assert result is not None
    assert (result.ratio, result.low, result.high) == (2.0, None, None)


@pytest.mark.parametrize("nothing", [[[0.0, 0]], [[1.0, 0]], [[0.0, 5]]])
def test_nothing_decoded_is_no_speedup(nothing: list[list[float]]) -> None:
    something = np.array([[1.0, 5]])
    assert speedup(np.array(nothing), something) is None
    assert speedup(something, np.array(nothing)) is None


def test_answers_of_one_token_are_summarized() -> None:
    answers = [answer(mode, line, decode=0.0, tokens=0) for line in (1, 2) for mode in ("off", "lookup")]
    figures = summarize(answers).overall["lookup"]
    assert figures.decode_speedup is None
    assert figures.tokens_per_second == 0
    assert figures.request_speedup is not None and figures.request_speedup.ratio == 1


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=12))
def test_the_interval_lies_within_the_ratios_of_single_prompts(seconds: list[tuple[float, float]]) -> None:
    base, other = (np.array([[cost, 10] for cost in costs]) for costs in zip(*seconds, strict=True))
    result = speedup(base, other)
    assert result is not None and result.low is not None and result.high is not None
    ratios = base[:, 0] / other[:, 0]
    margin = 1e-9 * ratios.max()
    assert ratios.min() - margin <= result.low <= result.high <= ratios.max() + margin
