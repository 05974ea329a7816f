"""The token that the coupled rule draws from a whole law, where the likeliest tokens of the row settle it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.logit_rows import TopTokens
from edge_spec.runtime.sampling import within_single_precision
from edge_spec.runtime.sampling_params import SamplingParams

# By how much one score must be above another for the rounding of single precision not to matter: of a logit over the
# temperature, its exponential, the logarithm of that, and the sum with the noise, as long as the weight is no less than
# exp(_LEAST), where precision begins to be lost.
_MARGIN = 1e-3
_LEAST = -80.0

# The largest noise of n tokens is hardly ever less than log n less the first, and that of a likely one, if it decides,
# hardly ever more than the second.
_BELOW_LOG, _DECISIVE = 2.5, 6.0


def token_of_top(
    top: TopTokens,
    columns: int,
    params: SamplingParams,
    noise_of: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    most_noise: Callable[[], float],
) -> int | None:
    """The token with the largest log probability + noise, where no token is left out by top-k, top-p or min-p.

    Every probability has the same denominator, so log probabilities can be compared without it: what counts is a logit
    over the temperature, plus noise. A token that is not known has at most the ceiling's and the largest noise.

    Args:
        top: what is known of the row.
        columns: ids of the whole row.
        params: with a temperature above 0.
        noise_of: the noise of some tokens, ascending.
        most_noise: what no token's noise exceeds.

    Returns:
        The token; ``None`` if it takes the whole row to tell.
    """
    if 0 < params.top_k < columns or params.top_p < 1.0 or params.min_p > 0.0:
        return None
    temperature = within_single_precision(params.temperature)
    ceiling = max((float(top.ceiling) - float(top.peak)) / temperature, _LEAST)
    if ceiling + math.log(columns) - _BELOW_LOG > _DECISIVE:
        return None  # hopeless, as a rule
    own = np.maximum((top.logits.astype(np.float64) - float(top.peak)) / temperature, _LEAST)
    scores = own + noise_of(top.ids)
    best = int(scores.argmax())
    highest = float(scores[best])
    scores[best] = ceiling + most_noise()
    if own[best] == _LEAST or not highest > float(scores.max()) + _MARGIN:
        return None
    return int(top.ids[best])
