"""Log-probabilities are the target's own log-softmax, whatever was done to the logits before sampling."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.logprobs import TokenLogprobs, log_probabilities


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 1000, 50_000]), st.integers(0, 25), st.floats(0.01, 30))
def test_they_are_the_log_softmax_of_the_row(seed: int, vocab: int, count: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(5, scale, vocab).astype(np.float32)
    token = int(generator.integers(vocab))
    exact = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).numpy()
    result = log_probabilities(logits, token, count)
    assert result.token_id == token
    assert result.logprob == pytest.approx(exact[token], rel=1e-6, abs=1e-6)
    best = sorted(range(vocab), key=lambda token: (-logits[token], token))[:count]
    assert [token for token, _ in result.top] == best
    assert [value for _, value in result.top] == pytest.approx(exact[best], rel=1e-6, abs=1e-6)


def test_a_certain_token_keeps_the_little_doubt_the_model_had() -> None:
    logits = np.array([0.0, 60.0, 0.0], np.float32)
    result = log_probabilities(logits, 1, 1)
    assert result.logprob == pytest.approx(-2 * math.exp(-60), rel=1e-6)
    assert result.top == ((1, result.logprob),)


def test_the_lower_id_comes_first_among_equals_and_impossible_tokens_are_left_out() -> None:
    logits = np.array([1.0, -np.inf, 2.0, 2.0, 1.0], np.float32)
    assert [token for token, _ in log_probabilities(logits, 0, 3).top] == [2, 3, 0]
    assert [token for token, _ in log_probabilities(logits, 0, 99).top] == [2, 3, 0, 4]
    assert log_probabilities(logits, 0, 0).top == ()


def test_they_are_plain_values_and_the_row_is_left_alone() -> None:
    logits = np.array([3.0, 1.0, 2.0], np.float32)
    result = log_probabilities(logits, 2, 2)
    assert logits.tolist() == [3, 1, 2]
    assert json.loads(json.dumps(asdict(result)))["top"] == [list(pair) for pair in result.top]
    assert result == TokenLogprobs(2, result.logprob, result.top) and hash(result)
