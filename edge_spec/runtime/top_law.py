"""The law of a row of which only the likeliest tokens are known, where it is certain to be that of the whole row.

Nothing here is an estimate: either every other token is shown to have probability zero and the known ones to go
through the same operations, in the same order, as with the whole row, or there is no answer (docs/cuda.md).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.logit_rows import TopTokens
from edge_spec.runtime.sampling import fill_law, likeliest, relative_weights, within_single_precision
from edge_spec.runtime.sampling_params import SamplingParams

# Weights are at most 1, and from here on multiples of 2^-45. Up to 256 of them have an exact sum in double precision,
# in whatever order and among however many zeros they are added.
_EXACT_SUMS = 2.0**-22

# How far exp in single precision may be from growing with its argument, relatively, and below what it loses precision.
_SLACK = 1e-5
_TINY = 1e-37

# Relative errors of weights in single precision, next to those of real numbers, and of sums in double precision.
_WEIGHT_ERROR = 1e-4
_SUM_ERROR = 1e-12


def law_of_top(
    top: TopTokens, columns: int, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """The law of the next token, bit for bit what :func:`~edge_spec.runtime.sampling.probabilities` makes of the row.

    Args:
        top: what is known of the row; other ids there are.
        columns: ids of the whole row.
        params: with a temperature above 0.

    Returns:
        Ids, int64 [n], ascending, and their probabilities, float32 [n], all others being 0; or ``None`` if it takes the
        whole row to tell.
    """
    if not top.peak > top.ceiling:
        return None
    kept = params.top_k if 0 < params.top_k < columns else columns
    if kept <= len(top.ids) and np.count_nonzero(top.logits > top.ceiling) >= kept:
        law = np.zeros(len(top.ids), np.float32)
        fill_law(top.logits, top.peak, params, law)
        return top.ids, law
    by_weight = _law_by_weight(top, columns, kept, params)
    return None if by_weight is None else (top.ids, by_weight)


def _law_by_weight(top: TopTokens, columns: int, kept: int, params: SamplingParams) -> NDArray[np.float32] | None:
    """The law of the known tokens, where top-p or min-p leaves no others.

    Args:
        top: what is known of the row.
        columns: ids of the whole row.
        kept: how many of them top-k leaves, among them all that are above the ceiling.
        params: top-p and min-p.
    """
    weights = relative_weights(np.append(top.logits, top.ceiling), top.peak, params.temperature)
    limit = float(weights[-1]) * (1.0 + _SLACK) + _TINY  # every other token weighs less
    weights = weights[:-1]
    min_p = np.float32(params.min_p)
    law = np.zeros(len(weights), np.float32)
    chosen: NDArray[np.int64] | slice = slice(None)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, limit, _total(top, columns, kept, weights, limit, params), params.top_p)
        if nucleus is None:
            return None
        chosen, weights = nucleus, weights[nucleus]
    elif not (min_p >= _EXACT_SUMS and min_p > limit):
        return None
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    weights /= np.float32(weights.sum(dtype=np.float64))
    law[chosen] = weights
    return law


def _nucleus(
    weights: NDArray[np.float32], limit: float, total: tuple[float, float], top_p: float
) -> NDArray[np.int64] | None:
    """Indices, ascending, of the fewest largest weights that hold ``top_p`` of a sum known to lie between two numbers.

    They are those of the whole row if both numbers lead to the same, and if each is too large for any other token.
    """
    sure = np.sort(weights[weights > limit])[::-1]
    mass = np.cumsum(sure, dtype=np.float64)
    fewest, most = (int(np.searchsorted(mass, top_p * bound)) for bound in total)
    if fewest != most or most >= len(mass):
        return None
    return likeliest(weights, most + 1)


def _total(
    top: TopTokens, columns: int, kept: int, weights: NDArray[np.float32], limit: float, params: SamplingParams
) -> tuple[float, float]:
    """Between what the weights of all tokens sum to that top-k leaves."""
    low, high = _weight_of_others(top, columns, params.temperature)
    known = float(weights.sum(dtype=np.float64))
    least = known
    if kept < columns:  # then only tokens above the ceiling are sure to be among those kept
        least, low = float(weights[weights > limit].sum(dtype=np.float64)), 0.0
        high = min(high, kept * limit)
    return (least + low * (1.0 - _WEIGHT_ERROR)) * (1.0 - _SUM_ERROR), (known + high * (1.0 + _WEIGHT_ERROR)) * (
        1.0 + _SUM_ERROR
    )


def _weight_of_others(top: TopTokens, columns: int, temperature: float) -> tuple[float, float]:
    """Between what the weights of the tokens sum to that are not known, the peak's being 1.

    At temperature 1 that is the whole row's sum less the known tokens', up to rounding. Let it be m, of n tokens whose
    logits lie c below the peak or more. A token that weighs w at temperature 1 weighs w w^(1/T - 1) at T. So their sum
    lies between m exp(c (1/T - 1)) and, by Jensen's inequality, n (m/n)^(1/T); which of them is the larger depends on
    whether T is below 1.
    """
    others, inverse = columns - len(top.ids), 1.0 / within_single_precision(temperature)
    peak, ceiling = float(top.peak), float(top.ceiling) - float(top.peak)  # relative to the peak
    trivial = others * _exp(ceiling * inverse)
    total = _exp(top.log_sum_exp - peak)
    if not math.isfinite(total):
        return 0.0, trivial
    known = float(np.exp(top.given.astype(np.float64) - peak).sum())
    error = total * _relative_error(top.log_sum_exp, columns)
    low, high = max(total - known - error, 0.0), max(total - known + error, 0.0)
    if top.lift is not None:
        low, high = 0.0, high * _exp(top.lift)
    (least, _), (_, most) = (
        sorted((mass * _exp(ceiling * (inverse - 1.0)), others * _exp(inverse * math.log(mass / others))))
        if mass > 0.0
        else (0.0, 0.0)
        for mass in (low, high)
    )
    return least, min(most, trivial)


def _relative_error(log_sum_exp: float, columns: int) -> float:
    """How far a sum of exponentials in single precision may be off, in whatever order it was added."""
    return columns * 2.0**-24 + abs(log_sum_exp) * 2.0**-22 + 2e-5


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700.0 else math.inf
