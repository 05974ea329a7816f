"""The law of the next token against a naive float64 reference, and noise that depends on its keys alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_spec.errors import EdgeSpecError
from edge_spec.runtime.sampling import SamplingParams, Stream, greedy_tokens, probabilities, sample, uniform

LARGEST_NOISE = 1.0 - 2.0**-53


def reference_law(logits: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """The law by plain loops over a sorted list, and how close its filters came to deciding otherwise."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0.0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(logits))], math.inf
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    margin = math.inf
    if params.top_p < 1.0:
        total, mass, kept = sum(weights.values()), 0.0, []
        for token in order:
            margin = min(margin, abs(mass / total - params.top_p))
            if mass / total >= params.top_p:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    if params.min_p > 0.0:
        margin = min(margin, *(abs(weights[token] - params.min_p) for token in order if weights[token] != 1.0), 1.0)
        order = [token for token in order if weights[token] >= params.min_p]
    total = sum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(logits))], margin


settings_of_a_request = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.55, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
)
# On a grid, since float32 cannot tell apart the probabilities of logits that differ by next to nothing.
logits = st.one_of(st.integers(-3, 3).map(float), st.integers(-8192, 8192).map(lambda step: step / 1024))
rows_of_logits = st.integers(1, 10).flatmap(
    lambda vocab: st.lists(st.lists(logits, min_size=vocab, max_size=vocab), min_size=1, max_size=4)
)


@settings(max_examples=400, deadline=None)
@given(rows_of_logits, settings_of_a_request)
def test_filters_apply_in_order_and_keep_the_lower_id_among_equals(
    rows: list[list[float]], params: SamplingParams
) -> None:
    expected = [reference_law(row, params) for row in rows]
    assume(all(margin > 1e-5 for _, margin in expected))
    laws = probabilities(np.array(rows, np.float32), params)
    assert laws.dtype == np.float32
    np.testing.assert_allclose(laws, [law for law, _ in expected], rtol=2e-5, atol=1e-9)
    assert np.array_equal(laws > 0, np.array([law for law, _ in expected]) > 0)


def test_temperature_zero_is_one_hot_at_the_first_maximum() -> None:
    logits = np.array([[1, 5, 5, 2], [7, 0, 0, 7]], np.float32)
    laws = probabilities(logits, SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=1.0))
    assert laws.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert greedy_tokens(logits).tolist() == [1, 0]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 500, "top_p": 0.8, "min_p": 0.001}]
)
def test_a_row_does_not_depend_on_its_company(filters: dict[str, Any]) -> None:
    logits = np.random.default_rng(7).normal(0, 3, (5, 49_152)).astype(np.float32)
    params = SamplingParams(temperature=0.8, **filters)
    together = probabilities(logits, params)
    for row in range(len(logits)):
        assert np.array_equal(probabilities(logits[row : row + 1], params)[0], together[row])


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary_is_the_smallest_that_holds_its_mass(scale: float, top_p: float) -> None:
    logits = np.random.default_rng(3).normal(0, scale, (1, 151_936)).astype(np.float32)
    unfiltered = probabilities(logits, SamplingParams(temperature=1.0))[0]
    full = np.sort(unfiltered.astype(np.float64))[::-1]
    law = probabilities(logits, SamplingParams(temperature=1.0, top_p=top_p))[0]
    size = np.count_nonzero(law)
    assert full[: size - 1].sum() < top_p + 1e-6
    assert full[:size].sum() > top_p - 1e-6
    assert unfiltered[law > 0].min() >= unfiltered[law == 0].max()
    assert law.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


def test_nucleus_that_holds_exactly_its_mass_takes_no_further_token() -> None:
    law = probabilities(np.zeros((1, 8), np.float32), SamplingParams(temperature=1.0, top_p=0.5))[0]
    assert law.tolist() == [0.25] * 4 + [0.0] * 4


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    logits = np.zeros((1, 1000), np.float32)
    logits[0, 700] = 1.0
    law = probabilities(logits, SamplingParams(temperature=1.0, top_k=5))[0]
    assert np.flatnonzero(law).tolist() == [0, 1, 2, 3, 700]


def test_masked_tokens_have_no_share() -> None:
    logits = np.array([[-np.inf, 1.0, -np.inf, 1.0]], np.float32)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.99)):
        assert probabilities(logits, params).tolist() == [[0, 0.5, 0, 0.5]]


@pytest.mark.parametrize(("temperature", "expected"), [(1e-300, [0, 1, 0]), (1e300, [1 / 3] * 3)])
def test_extreme_temperatures_reach_their_limits(temperature: float, expected: list[float]) -> None:
    law = probabilities(np.array([[-40.0, 60.0, 59.0]], np.float32), SamplingParams(temperature=temperature))
    np.testing.assert_allclose(law[0], expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[0.0, np.nan, 9.0], [0.0, np.inf, 9.0], [-np.inf] * 3])
def test_broken_logits_are_named_not_sampled(temperature: float, broken: list[float]) -> None:
    logits = np.array([[1.0, 2.0, 3.0], broken], np.float32)
    with pytest.raises(EdgeSpecError, match="at row 1, the largest logit is .* expected a finite number"):
        probabilities(logits, SamplingParams(temperature=temperature))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any),
    st.sampled_from([1, 60, 1100]),
    st.sampled_from([np.float32, np.float64]),
)
def test_sampling_gives_each_token_exactly_its_share(shares: list[int], gap: int, dtype: type) -> None:
    """Whole-number weights over a power of two: the boundaries between tokens are exact numbers."""
    shares = [*shares, 2 ** math.ceil(math.log2(sum(shares))) - sum(shares)]
    weights = np.zeros(len(shares) * gap, dtype)
    weights[::gap] = shares  # spread over one or many blocks
    edges = [edge / sum(shares) for edge in itertools.accumulate(shares)]
    below = 0.0
    for token, (share, above) in enumerate(zip(shares, edges, strict=True)):
        if share:
            assert sample(weights, below) == token * gap
            assert sample(weights, np.nextafter(above, 0.0)) == token * gap
        below = above


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-300, 0.5, LARGEST_NOISE]))
def test_sampling_never_returns_a_token_of_weight_zero(seed: int, noise: float) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.random(3000).astype(np.float32) * generator.choice([1e-30, 1.0])
    weights[generator.random(3000) < 0.9] = 0.0
    weights[-1500:] = 0.0
    weights[17] = 1e-38
    assert weights[sample(weights, noise)] > 0.0


def test_noise_is_independent_of_the_order_of_calls() -> None:
    keys = [(seed, position, stream) for seed in (0, -1, 5) for position in range(20) for stream in Stream]
    forward = {key: uniform(*key) for key in keys}
    backward = {key: uniform(*key) for key in reversed(keys)}
    np.random.default_rng(0).shuffle(keys)
    assert forward == backward == {key: uniform(*key) for key in keys}


def test_noise_of_a_seed_never_changes() -> None:
    """A seed is a promise across versions and machines."""
    assert uniform(42, 0, Stream.TOKEN) == 0.8201981478608876
    assert uniform(42, 1, Stream.TOKEN) == 0.20650309990981752
    assert uniform(42, 1, Stream.ACCEPT) == 0.9106083054062896
    assert uniform(-(2**63), 10**6, Stream.DRAFT) == 0.4290896017585175
    assert uniform(2**63 - 1, 10**6, Stream.DRAFT) == 0.4128894804902683


def test_noise_differs_between_seeds_positions_and_streams() -> None:
    keys = itertools.product((-(2**63), -1, 0, 1, 2**63 - 1), range(500), Stream)
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("varied", ["seed", "position", "stream"])
def test_noise_is_uniform_along_every_key(varied: str) -> None:
    count = 20_000
    fixed = {"seed": 11, "position": 4, "stream": int(Stream.TOKEN)}
    values = np.sort([uniform(**{**fixed, varied: index}) for index in range(count)])
    assert values[0] >= 0.0 and values[-1] < 1.0
    distance = np.abs(values - (np.arange(count) + 0.5) / count).max() + 0.5 / count  # Kolmogorov-Smirnov
    assert distance * math.sqrt(count) < 1.95  # one in a thousand, and the keys are fixed


def test_neighbouring_noise_is_uncorrelated() -> None:
    noise = np.array([[uniform(3, position, stream) for stream in Stream] for position in range(5000)]) - 0.5
    columns = np.concatenate([noise[1:], noise[:-1]], axis=1)
    correlation = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 5 / math.sqrt(len(columns))


def test_numpy_numbers_and_any_sequence_of_stop_strings_become_plain_values() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=np.int32(-7),  # type: ignore[arg-type]
        top_p=1,
        stop=["a", "b"],  # type: ignore[arg-type]
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=-7, top_p=1.0, stop=("a", "b"))
    assert [type(value) for value in (params.temperature, params.top_k, params.seed, params.top_p)] == [
        float,
        int,
        int,
        float,
    ]
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_a_missing_seed_is_drawn_once_and_a_given_one_kept() -> None:
    given_seed = SamplingParams(seed=0)
    assert given_seed.seeded() is given_seed
    drawn = SamplingParams(temperature=0.3, stop=("x",)).seeded()
    assert drawn.seed is not None and drawn.seeded() == drawn
    assert (drawn.temperature, drawn.stop) == (0.3, ("x",))
    assert drawn.seed != SamplingParams().seeded().seed
