"""How likely the target found the tokens that were emitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.sampling import likeliest


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one emitted token.

    They are the target model's own, before penalties, bias, masks, temperature and filters (as OpenAI and vLLM report
    them): a token that sampling could not avoid still has the probability that the model gave it. A draft's opinion
    never enters, and speculation does not change them.

    Attributes:
        token_id: the emitted token.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens and their log-probabilities, likeliest first, the lower id among equals; the emitted
            token is among them only if it is that likely.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Log-softmax at the emitted token and at the likeliest ones.

    Args:
        logits: float32 [vocab], the row of the target that the token was chosen from, unprocessed; its maximum is
            finite.
        token_id: the emitted token.
        count: how many of the likeliest tokens to report; all that are possible, if there are fewer.
    """
    peak = int(logits.argmax())
    shifted = logits - logits[peak]
    weights = np.exp(shifted)
    weights[peak] = 0.0  # it is exactly one; left out, so that the others are not lost in rounding
    log_total = math.log1p(float(weights.sum(dtype=np.float64)))

    def logprob(token: int) -> float:
        return float(shifted[token]) - log_total

    best = likeliest(shifted, min(count, len(shifted))) if count else np.zeros(0, np.int64)
    ranked = best[np.argsort(-shifted[best], kind="stable")]
    top = tuple((int(token), logprob(token)) for token in ranked if shifted[token] > -np.inf)
    return TokenLogprobs(token_id, logprob(token_id), top)
