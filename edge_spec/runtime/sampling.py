"""From logits to the law of the next token."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.noise import Stream as Stream
from edge_spec.runtime.noise import sample as sample
from edge_spec.runtime.noise import uniform as uniform
from edge_spec.runtime.sampling_params import SamplingParams as SamplingParams


def greedy_tokens(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The likeliest token of every row; the lowest id among equals.

    Args:
        logits: float32 [rows, vocab].

    Returns:
        int64 [rows].

    Raises:
        LogitsError: a row has no finite maximum (the model computed NaN or infinity).
    """
    tokens: NDArray[np.int64] = np.argmax(logits, axis=1)
    for row, token in enumerate(tokens):
        require_finite(logits[row, token], row)  # argmax stops at a NaN, so looking there finds any
    return tokens


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float32]:
    """The law of the next token for every row: temperature, then top-k, top-p and min-p.

    Each filter sees the law its predecessor left. Among equally likely tokens the lower id is kept, so the law
    is a function of the logits alone, whatever partition or sort algorithm the processor gets. Rows are computed
    one by one: a row's law does not depend, not even in its last bit, on the rows it travels with.

    Args:
        logits: float32 [rows, vocab]; -inf marks a token that must not be sampled.
        params: temperature 0 gives the one-hot law of the likeliest token.

    Returns:
        float32 [rows, vocab], rows summing to one.

    Raises:
        LogitsError: a row has no finite maximum (the model computed NaN or infinity).
    """
    laws = np.zeros(logits.shape, np.float32)
    if params.greedy:
        laws[np.arange(len(logits)), greedy_tokens(logits)] = 1.0
        return laws
    for row, (values, law) in enumerate(zip(logits, laws, strict=True)):
        peak = values.max()
        require_finite(peak, row)
        fill_law(values, peak, params, law)
    return laws


def fill_law(logits: NDArray[np.float32], peak: np.float32, params: SamplingParams, law: NDArray[np.float32]) -> None:
    """Write the law of one row, float32 [vocab], whose largest logit is ``peak``, into ``law``, which is all zero."""
    kept = likeliest(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    weights = relative_weights(logits if kept is None else logits[kept], peak, params.temperature)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    if params.min_p > 0.0:
        weights[weights < np.float32(params.min_p)] = 0.0  # the peak weighs exactly one
    weights /= np.float32(weights.sum(dtype=np.float64))
    law[slice(None) if kept is None else kept] = weights


def relative_weights(logits: NDArray[np.float32], peak: np.float32, temperature: float) -> NDArray[np.float32]:
    """How likely tokens are at a temperature, relative to one whose logit is ``peak``: float32, as many as logits."""
    weights = logits - peak
    with np.errstate(over="ignore", under="ignore"):  # far from the peak: -inf and 0 are the right values
        weights /= np.float32(within_single_precision(temperature))
        np.exp(weights, out=weights)
    return weights


def within_single_precision(temperature: float) -> float:
    """The temperature, or the nearest one that single precision has."""
    limits = np.finfo(np.float32)
    return min(max(temperature, float(limits.tiny)), float(limits.max))


def likeliest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the ``count`` largest values; the lower index wins among equals."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, level)))


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest largest weights that hold ``top_p`` of their sum.

    Weights below (1 - top_p) / count of the sum hold, all together, less than 1 - top_p of it. So they are not
    needed, and only the others, usually few, are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    values = weights[candidates]
    mass = np.cumsum(np.sort(values)[::-1], dtype=np.float64)
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(values))
    return candidates[likeliest(values, count)]


def require_finite(peak: float | np.float32, row: int) -> None:
    """Raise a LogitsError unless the largest logit of the row is a finite number."""
    if not math.isfinite(peak):
        raise LogitsError(
            f"the largest logit is {float(peak)}, expected a finite number: the model's computation broke down on this "
            "device; use another device, or export the bundle again with a finer recipe",
            row,
        )
