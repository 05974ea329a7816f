"""From logits to the law of the next token, and from a law and keyed noise to a token."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import EdgeSpecError, RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
_BLOCK = 1024  # weights summed at a time when sampling


class Stream(IntEnum):
    """What a uniform number decides. Decisions about one position take their noise from different streams.

    The values are part of what a seed means: changing one changes every text sampled with a seed.
    """

    TOKEN = 0  # the target's own token: plain decoding, the bonus token, the replacement of a rejected token
    ACCEPT = 1  # whether a draft token is kept
    DRAFT = 2  # the draft token itself


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: only the k likeliest tokens remain; 0 keeps all.
        top_p: only the smallest set of likeliest tokens with at least this mass remains; 1 keeps all.
        min_p: only tokens at least this likely, relative to the likeliest one, remain; 0 keeps all.
        seed: 64-bit signed integer the noise is keyed by; ``None`` asks for a fresh one (see :meth:`seeded`).
        max_new_tokens: generation ends after this many tokens.
        stop: generation ends before the first of these strings. One string, or any sequence of strings, is
            accepted and kept as a tuple.

    Raises:
        RequestError: a value has the wrong type or lies outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        temperature = _real("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        if not 0.0 <= temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        top_p = _real("top_p", self.top_p, "a number above 0 and at most 1 (1 keeps every token)")
        if not 0.0 < top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "a number above 0 and at most 1 (1 keeps every token)")
        min_p = _real("min_p", self.min_p, "a number from 0 to 1 (0 keeps every token)")
        if not 0.0 <= min_p <= 1.0:
            raise _out_of_range("min_p", self.min_p, "a number from 0 to 1 (0 keeps every token)")
        top_k = _integer("top_k", self.top_k, "an integer of at least 0 (0 keeps every token)")
        if top_k < 0:
            raise _out_of_range("top_k", self.top_k, "an integer of at least 0 (0 keeps every token)")
        max_new_tokens = _integer("max_new_tokens", self.max_new_tokens, "an integer of at least 1")
        if max_new_tokens < 1:
            raise _out_of_range("max_new_tokens", self.max_new_tokens, "an integer of at least 1")
        seed = self.seed
        if seed is not None:
            seed = _integer("seed", seed, "None or an integer that fits 64 bits with sign")
            if not SEED_MIN <= seed <= SEED_MAX:
                raise _out_of_range("seed", seed, "None or an integer that fits 64 bits with sign")
        normalized: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "stop": stop_strings(self.stop),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no noise is used."""
        return self.temperature == 0.0

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: their own, or a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def stop_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple.

    Raises:
        RequestError: not strings, or an empty string among them.
    """
    given: object = stop
    strings = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(string, str) and string for string in strings):
        raise _out_of_range("stop", stop, "a non-empty string or a sequence of non-empty strings")
    return strings


def greedy_tokens(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The likeliest token of every row; the lowest id among equals.

    Args:
        logits: float32 [rows, vocab].

    Returns:
        int64 [rows].

    Raises:
        EdgeSpecError: a row has no finite maximum (the model computed NaN or infinity).
    """
    tokens: NDArray[np.int64] = np.argmax(logits, axis=1)
    for row, token in enumerate(tokens):
        _require_finite(logits[row, token], row)  # argmax stops at a NaN, so looking there finds any
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
        EdgeSpecError: a row has no finite maximum (the model computed NaN or infinity).
    """
    laws = np.zeros(logits.shape, np.float32)
    if params.greedy:
        laws[np.arange(len(logits)), greedy_tokens(logits)] = 1.0
        return laws
    for row, (values, law) in enumerate(zip(logits, laws, strict=True)):
        peak = values.max()
        _require_finite(peak, row)
        _fill_law(values, peak, params, law)
    return laws


def sample(weights: NDArray[np.floating[Any]], noise: float) -> int:
    """The token whose share of the weights, laid end to end by id, covers ``noise``.

    A token of weight zero is never returned, whatever the rounding.

    Args:
        weights: [vocab], non-negative, not all zero; need not sum to one.
        noise: uniform in [0, 1).
    """
    # A running sum over a whole vocabulary takes milliseconds, since each addition waits for the one before it. Sums
    # of blocks do not wait for each other, and then only one block needs a running sum.
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    target = noise * blocks[-1]
    block = _first_above(blocks, target)
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _first_above(inside, target - (blocks[block - 1] if block else 0.0))


def uniform(seed: int, position: int, stream: int) -> float:
    """Noise for one decision: a number in [0, 1) that depends on its three keys and on nothing else.

    Philox is a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): keyed
    by the seed, it maps every counter to independent bits. So noise needs no state, and a position that is decided
    again after a rollback meets the same noise.

    Args:
        seed: 64-bit signed integer.
        position: absolute position in the sequence of the token being decided.
        stream: what is being decided, see :class:`Stream`.
    """
    key = np.array([seed & (2**64 - 1), 0], np.uint64)
    # The generator counts up in word 0, which stays free for decisions that need more than one number.
    counter = np.array([0, position, stream, 0], np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53


def _fill_law(logits: NDArray[np.float32], peak: np.float32, params: SamplingParams, law: NDArray[np.float32]) -> None:
    """Write the law of one row, float32 [vocab], into ``law``, which is all zero."""
    limits = np.finfo(np.float32)
    temperature = np.float32(min(max(params.temperature, float(limits.tiny)), float(limits.max)))
    kept = _likeliest(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    weights = (logits if kept is None else logits[kept]) - peak
    with np.errstate(over="ignore", under="ignore"):  # far from the peak: -inf and 0 are the right values
        weights /= temperature
        np.exp(weights, out=weights)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    if params.min_p > 0.0:
        weights[weights < np.float32(params.min_p)] = 0.0  # the peak weighs exactly one
    weights /= np.float32(weights.sum(dtype=np.float64))
    law[slice(None) if kept is None else kept] = weights


def _likeliest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
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
    return candidates[_likeliest(values, count)]


def _first_above(edges: NDArray[np.float64], target: float) -> int:
    """Index of the first of the running sums above ``target``; the last that grew if rounding leaves none."""
    index = int(np.searchsorted(edges, target, side="right"))
    return index if index < len(edges) else int(np.searchsorted(edges, edges[-1]))


def _require_finite(peak: np.float32, row: int) -> None:
    if not np.isfinite(peak):
        raise EdgeSpecError(
            f"the largest logit of row {row} is {float(peak)}, expected a finite number: the model's computation "
            "broke down on this device; use another device, or export the bundle again with a finer recipe"
        )


def _real(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise _out_of_range(name, value, expected)
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        raise _out_of_range(name, value, expected) from None


def _integer(name: str, value: object, expected: str) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise _out_of_range(name, value, expected)
    return int(value)


def _out_of_range(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} is {value!r}, expected {expected}")
