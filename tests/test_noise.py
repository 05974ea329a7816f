"""Gumbel noise, and the noise of a round: a function of its keys, and never used twice."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.noise import Noise, RoundNoise, Stream, gumbel, sample, sample_gumbel, uniform
from edge_spec.runtime.proposal import Law, Proposal
from edge_spec.runtime.verification import RULES
from enumeration import Prefix

SEEDS = st.integers(-(2**63), 2**63 - 1)
VOCAB = 151_936


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, position=st.integers(0, 2**40), vocab=st.integers(1, 3000), more=st.integers(0, 3000))
def test_a_tokens_noise_depends_on_seed_position_and_token_alone(
    seed: int, position: int, vocab: int, more: int
) -> None:
    noise = gumbel(seed, position, vocab)
    assert noise.dtype == np.float32 and noise.shape == (vocab,) and np.isfinite(noise).all()
    assert np.array_equal(noise, gumbel(seed, position, vocab + more)[:vocab])
    for other in (gumbel(seed, position + 1, vocab), gumbel(seed ^ 1, position, vocab)):
        assert not (noise == other).all() or vocab < 3


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, position=st.integers(0, 2**40), vocab=st.integers(1, 20000), data=st.data())
def test_the_noise_of_a_few_tokens_is_that_of_all(seed: int, position: int, vocab: int, data: st.DataObject) -> None:
    every = gumbel(seed, position, vocab)
    loud = np.argsort(every)[-5:]  # whose noise is the finest
    few = data.draw(st.lists(st.integers(0, vocab - 1), max_size=50))
    ids = np.unique(np.array([*loud, *few], np.int64))
    noise = Noise(seed)
    assert noise.gumbel_of(position, vocab, ids).tobytes() == every[ids].tobytes()
    least = data.draw(st.floats(-4, 15))
    louder = noise.louder(position, vocab, least)
    assert set(np.flatnonzero(every > least)) <= set(louder) <= set(np.flatnonzero(every > least - 0.01))
    noise.gumbel(position, vocab)
    assert noise.gumbel_of(position, vocab, ids).tobytes() == every[ids].tobytes()


def test_gumbel_noise_of_a_seed_never_changes() -> None:
    """A seed is a promise across versions and machines, up to the last bits of a logarithm."""
    np.testing.assert_allclose(gumbel(42, 0, 4), [1.067676, -0.3563869, 0.2759436, -0.05561732], rtol=1e-5)
    np.testing.assert_allclose(gumbel(-(2**63), 10**6, 4), [1.265207, 0.7011373, 1.452077, -0.4730967], rtol=1e-5)


def test_gumbel_noise_has_its_distribution() -> None:
    noise = gumbel(7, 3, 4_000_000).astype(np.float64)
    below = np.sort(np.exp(-np.exp(-noise)))
    count = len(below)
    distance = np.abs(below - (np.arange(count) + 0.5) / count).max() + 0.5 / count  # Kolmogorov-Smirnov
    assert distance * math.sqrt(count) < 1.95
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=5 * math.pi / math.sqrt(6 * count))


def test_the_tail_that_decides_is_exact_and_fine_grained() -> None:
    """The largest noises: as many as there should be, uniform among themselves, and no two the same."""
    noise = np.concatenate([gumbel(1, position, VOCAB) for position in range(30)]).astype(np.float64)
    w = -np.expm1(-np.exp(-noise))  # uniform
    count = len(w)
    for tail in (2.0**-8, 2.0**-12, 2.0**-16, 2.0**-18):
        seen, expected = int((w < tail).sum()), count * tail
        assert abs(seen - expected) < 4.5 * math.sqrt(expected)
    inside = np.sort(w[w < 2.0**-12] * 2.0**12)
    distance = np.abs(inside - (np.arange(len(inside)) + 0.5) / len(inside)).max()
    assert distance * math.sqrt(len(inside)) < 1.95
    largest = noise[noise > 8.5]
    assert len(np.unique(largest)) > 0.99 * len(largest) > 500  # float32 itself has 2^20 steps between 8 and 16


def test_neighbouring_gumbel_noise_is_uncorrelated() -> None:
    rows = np.stack([gumbel(seed, position, 20_000) for seed in (0, 1) for position in range(4)])
    correlation = np.corrcoef(np.concatenate([rows[:, 1:], rows[:, :-1]])) - np.eye(2 * len(rows))
    assert np.abs(correlation).max() < 5 / math.sqrt(20_000)


def test_gumbel_noise_of_a_large_vocabulary_is_cheap() -> None:
    """About 1.2 ms on the machine this was written on; a generous bound, since machines differ and are shared."""
    best = math.inf
    for position in range(20):
        started = perf_counter()
        gumbel(0, position, VOCAB)
        best = min(best, perf_counter() - started)
    assert best < 0.02


def test_excluded_tokens_never_win() -> None:
    for position in range(50):
        noise = gumbel(3, position, 6)
        assert sample_gumbel(np.array([0, 1e-38, 0, 0, 1e-38, 0], np.float32), noise) in (1, 4)
    assert sample_gumbel(np.ones(3), np.zeros(3)) == 0


def test_recent_gumbel_noise_is_kept_and_shared() -> None:
    noise = Noise(9, kept=2)
    first = noise.gumbel(4, 50)
    assert noise.gumbel(4, 50) is first and np.array_equal(first, gumbel(9, 4, 50))
    assert noise.gumbel(4, 20).shape == (20,)
    noise.gumbel(5, 50)
    assert noise.gumbel(4, 50) is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0.0


# Rounds


def test_a_round_decides_with_the_probabilities_it_is_told() -> None:
    """The sampler takes the very decisions whose probabilities the exact tests enumerate."""
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    for start, node in itertools.product(range(0, 300, 7), range(4)):
        noise = Noise(start - 5).round(start)
        number = uniform(start - 5, start, Stream.ACCEPT, node)
        for probability in (0.0, 1e-300, 0.3, number, np.nextafter(number, 1.0), 0.9, 1.0 - 2.0**-53, 1.0):
            assert noise.keep(node, probability) == (number < probability)
        assert noise.draw(weights) == sample(weights, uniform(start - 5, start, Stream.TOKEN))
        assert noise.draw_draft(node, weights) == sample(weights, uniform(start - 5, start, Stream.DRAFT, node))
        assert np.array_equal(noise.gumbel(node, 5), gumbel(start - 5, start + node, 5))


def test_keeping_for_certain_or_never_needs_no_noise() -> None:
    class Silent(Noise):
        def uniform(self, position: int, stream: int, index: int = 0) -> float:
            raise AssertionError

    noise = Silent(0).round(0)
    assert noise.keep(0, 1.0) and not noise.keep(0, 0.0)


class Overheard(Noise):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys: list[tuple[int, int, int]] = []

    def uniform(self, position: int, stream: int, index: int = 0) -> float:
        self.keys.append((position, stream, index))
        return super().uniform(position, stream, index)


P, Q = np.array([0.5, 0.5]), np.array([0.9, 0.1])  # after every prefix
RoundOf = Callable[[Noise, int], RoundNoise]


def text_of(rule: str, noise: Noise, length: int, drafted: int, round_of: RoundOf = Noise.round) -> Prefix:
    """Decode with drafts from the production noise."""
    text: Prefix = ()
    while len(text) < length:
        chance = round_of(noise, len(text))
        tokens: Prefix = ()
        while len(tokens) < min(drafted, length - len(text) - 1):
            tokens = (*tokens, chance.draw_draft(len(tokens), Q))
        verdict = RULES[rule].verify([P] * (len(tokens) + 1), Proposal(tokens, [Q] * len(tokens)), chance)
        text += (*tokens[: verdict.accepted], verdict.next_token)
    return text


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_no_noise_is_used_twice_in_a_text(rule: str) -> None:
    for seed in range(60):
        noise = Overheard(seed)
        text_of(rule, noise, 5, 3)
        assert len(set(noise.keys)) == len(noise.keys)


class ByPosition(RoundNoise):
    """The tempting mistake: all noise keyed by the absolute position of the token it is about."""

    def keep(self, node: int, probability: float) -> bool:
        return self._noise.uniform(self._start + node, Stream.ACCEPT) < probability

    def draw_draft(self, node: int, weights: Law) -> int:
        return sample(weights, self._noise.uniform(self._start + node, Stream.DRAFT))


def distance_over_rounds(rule: str, round_of: RoundOf, count: int = 3000, length: int = 4) -> float:
    """Total variation between texts of several rounds, over seeds, and the target's law."""
    texts = Counter(text_of(rule, Noise(seed), length, 3, round_of) for seed in range(count))
    every = itertools.product(range(2), repeat=length)
    return sum(abs(texts[text] / count - math.prod(P[token] for token in text)) for text in every) / 2


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_texts_of_several_rounds_follow_the_targets_law(rule: str) -> None:
    assert distance_over_rounds(rule, Noise.round) < 0.035


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_noise_that_the_next_round_meets_again_is_noticed(rule: str) -> None:
    """Block and traversal look beyond the place where they stop, so what is decided again needs fresh noise."""
    assert distance_over_rounds(rule, ByPosition) > 0.07
