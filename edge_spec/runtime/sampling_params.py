"""How tokens are chosen and when generation ends: what a request may ask for, validated at the edge."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from edge_spec.errors import RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

_TEMPERATURE = "a finite number of at least 0 (0 is greedy)"
_TOP_K = "an integer of at least 0 (0 keeps every token)"
_TOP_P = "a number above 0 and at most 1 (1 keeps every token)"
_MIN_P = "a number from 0 to 1 (0 keeps every token)"
_SEED = "None or an integer that fits 64 bits with sign"
_MAX_NEW_TOKENS = "an integer of at least 0"
_REPETITION = "a number from 0.01 to 100 (1 changes nothing)"
_OPENAI_PENALTY = "a number from -2 to 2 (0 changes nothing)"
_LOGIT_BIAS = "a mapping from token ids to numbers from -100 to 100"
_LOGPROBS = "None or an integer of at least 0"
_DEADLINE = "None or a finite number of seconds above 0"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    The logits are changed in this order: penalties, ``logit_bias``, the app's own processors, allowed and banned
    tokens, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: only the k likeliest tokens remain; 0 keeps all.
        top_p: only the smallest set of likeliest tokens with at least this mass remains; 1 keeps all.
        min_p: only tokens at least this likely, relative to the likeliest one, remain; 0 keeps all.
        seed: 64-bit signed integer the noise is keyed by; ``None`` asks for a fresh one (see :meth:`seeded`).
        max_new_tokens: generation ends after this many tokens; 0 gives an empty completion.
        stop: generation ends before the first of these strings. One string, or any sequence of strings, is
            accepted and kept as a tuple.
        repetition_penalty: positive logits of tokens that occur in the prompt or the output are divided by it,
            negative ones multiplied (CTRL, Keskar et al. 2019; as in transformers); 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that occur in the output, the prompt not counted (as in
            OpenAI's API); 0 changes nothing.
        frequency_penalty: subtracted once per occurrence in the output, likewise; 0 changes nothing.
        logit_bias: what to add to the logits, by token id. A mapping is accepted and kept as sorted pairs.
        allowed_token_ids: nothing else is ever chosen; ``None`` allows all. Kept as a sorted tuple.
        banned_token_ids: never chosen. Kept as a sorted tuple.
        stop_token_ids: a token among these ends the text, as an end-of-text token does: it is emitted, but is not
            part of the text. Kept as a sorted tuple.
        logprobs: report each emitted token's log-probability, and those of this many likeliest ones; ``None`` reports
            nothing.
        deadline: generation ends when this many seconds have passed since the request; ``None`` has no limit.

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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        allowed: tuple[int, ...] | None = None
        banned = _token_ids("banned_token_ids", self.banned_token_ids)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not set(allowed) - set(banned):
                raise RequestError(
                    f"allowed_token_ids is {self.allowed_token_ids!r}, and banned_token_ids leaves none of them; allow "
                    "at least one token, or leave allowed_token_ids out to allow all"
                )
        normalized: dict[str, Any] = {
            "temperature": _real("temperature", self.temperature, _TEMPERATURE, 0.0, math.nextafter(math.inf, 0.0)),
            "top_k": _integer("top_k", self.top_k, _TOP_K, 0),
            "top_p": _real("top_p", self.top_p, _TOP_P, math.nextafter(0.0, 1.0), 1.0),
            "min_p": _real("min_p", self.min_p, _MIN_P, 0.0, 1.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, _SEED, SEED_MIN, SEED_MAX),
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, _MAX_NEW_TOKENS, 0),
            "stop": stop_strings(self.stop),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, _REPETITION, 0.01, 100.0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, _OPENAI_PENALTY, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, _OPENAI_PENALTY, -2.0, 2.0),
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": allowed,
            "banned_token_ids": banned,
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, _LOGPROBS, 0),
            "deadline": None if self.deadline is None else _seconds("deadline", self.deadline),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no noise is used."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the logits depend on which tokens came before, beyond what the model makes of them."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: their own, or a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def require_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against a vocabulary.

        Raises:
            RequestError: an id does not exist, or every token is banned.
        """
        given = {
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in given.items():
            if tokens and tokens[-1] >= vocab_size:  # they are sorted
                raise RequestError(
                    f"{name} holds token id {tokens[-1]}, which is out of range; this vocabulary has ids 0 to "
                    f"{vocab_size - 1}"
                )
        if len(self.banned_token_ids) == vocab_size:
            raise RequestError(f"banned_token_ids holds all {vocab_size} tokens of the vocabulary; leave at least one")


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


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    """Sorted, each once."""
    expected = "a sequence of token ids, integers of at least 0"
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise _out_of_range(name, given, expected)
    tokens = tuple(given)
    if not all(_is_token_id(token) for token in tokens):
        raise _out_of_range(name, given, expected)
    return tuple(sorted({int(token) for token in tokens}))


def _logit_bias(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, sorted by id; a bias of zero is left out."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise _out_of_range("logit_bias", given, _LOGIT_BIAS)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not _is_token_id(pair[0]):
            raise _out_of_range("logit_bias", given, _LOGIT_BIAS)
        biases[int(pair[0])] = _real(f"logit_bias of token {pair[0]}", pair[1], "a number from -100 to 100", -100, 100)
    return tuple((token, bias) for token, bias in sorted(biases.items()) if bias)


def _is_token_id(value: object) -> bool:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        return False
    return int(value) >= 0


def _seconds(name: str, value: object) -> float:
    return _real(name, value, _DEADLINE, math.nextafter(0.0, 1.0), math.nextafter(math.inf, 0.0))


def _real(name: str, value: object, expected: str, lowest: float, highest: float) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise _out_of_range(name, value, expected)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        raise _out_of_range(name, value, expected) from None
    if not lowest <= number <= highest:
        raise _out_of_range(name, value, expected)
    return number


def _integer(name: str, value: object, expected: str, lowest: int, highest: float = math.inf) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise _out_of_range(name, value, expected)
    if not lowest <= int(value) <= highest:
        raise _out_of_range(name, value, expected)
    return int(value)


def _out_of_range(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} is {value!r}, expected {expected}")
