"""The token that the coupled rule chooses by a whole law: among those that are likely and those with much noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.logit_rows import TopTokens
from edge_spec.runtime.sampling import within_single_precision

# By how much one score must be above another for the rounding of single precision not to matter: of a logit over the
# temperature, its exponential, the logarithm of that, and the sum with the noise, as long as the weight is no less than
# exp(_LEAST), where precision begins to be lost.
_MARGIN = 1e-3
_LEAST = -80.0

# With more candidates than about so many, law and noise of all tokens take no longer.
_MOST_CANDIDATES = 4096


@dataclass(frozen=True)
class PlaceNoise:
    """The Gumbel noise of one place in the text.

    Attributes:
        of: that of some tokens, given ascending.
        louder: all tokens, ascending, with more noise than that, and maybe some more.
    """

    of: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    louder: Callable[[float], NDArray[np.int64]]


def token_of_top(
    top: TopTokens, columns: int, temperature: float, noise: PlaceNoise, row: Callable[[], NDArray[np.float32]]
) -> int | None:
    """The token with the largest log probability + noise, where no token is left out by top-k, top-p or min-p.

    Every probability has the same denominator, so log probabilities can be compared without it: what counts is a logit
    over the temperature, plus noise. None but a few of the tokens that are not known have so much noise that they could
    win even with a logit at the ceiling. If there are any, the row is asked for theirs.

    Args:
        top: what is known of the row.
        columns: ids of the whole row.
        temperature: above 0.
        noise: of the token in question.
        row: gives the whole row, float32 [columns].

    Returns:
        The token; ``None`` if the two best are too close, or the candidates too many.
    """
    divisor, peak = within_single_precision(temperature), float(top.peak)
    ceiling = max((float(top.ceiling) - peak) / divisor, _LEAST)
    if ceiling > 0.0:
        return None
    own = _relative(top.logits, peak, divisor)
    scores = own + noise.of(top.ids)
    # No token with less noise than this can win, or come near.
    least = float(scores.max()) - ceiling - _MARGIN
    if least < math.log(columns / _MOST_CANDIDATES):
        return None
    ids = top.ids
    others = np.setdiff1d(noise.louder(least), ids, assume_unique=True)
    if len(others):
        also = _relative(row()[others], peak, divisor)
        ids, own = np.concatenate((ids, others)), np.concatenate((own, also))
        scores = np.concatenate((scores, also + noise.of(others)))
    best = int(scores.argmax())
    near = np.count_nonzero(scores > scores[best] - _MARGIN)
    return int(ids[best]) if near == 1 and own[best] > _LEAST else None


def _relative(logits: NDArray[np.float32], peak: float, divisor: float) -> NDArray[np.float64]:
    """Logits over the temperature, the peak's being 0, and none below what single precision tells apart."""
    relative: NDArray[np.float64] = np.maximum((logits.astype(np.float64) - peak) / divisor, _LEAST)
    return relative
