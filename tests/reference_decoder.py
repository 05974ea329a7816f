"""The oracle: decoding one token at a time, written to be obviously right and never to be fast.

It shares no code with the package. The model is any function from a history to logits. Arithmetic that decides exactly
(penalties, bias, comparisons of logits) is in float32 as specified; laws and noise are in float64, so a decision can
differ from the package's only where two tokens are as good as equal. How near it ever came to that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LogitsOf = Callable[[list[int]], np.ndarray]
Processor = Callable[[Sequence[int], np.ndarray], np.ndarray]

GUMBEL_STREAM = 3
EXTRA_BITS = 2**32


@dataclass(frozen=True)
class Reference:
    """A finished text.

    Attributes:
        token_ids: emitted tokens.
        finish_reason: "stop" or "length".
        margin: how far the nearest decision was from another outcome; float32 rounding is about 1e-6.
    """

    token_ids: list[int]
    finish_reason: str
    margin: float


class DeadEndError(Exception):
    """Every token is excluded at a position."""

    def __init__(self, position: int, margin: float) -> None:
        super().__init__(position)
        self.position, self.margin = position, margin


def reference_decode(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
    allowed_token_ids: Iterable[int] | None = None,
    banned_token_ids: Iterable[int] = (),
    logits_processors: Sequence[Processor] = (),
    eos_token_ids: Iterable[int] = (),
    stop_token_ids: Iterable[int] = (),
    stop: Sequence[str] = (),
    decode: Callable[[list[int]], str] = lambda token_ids: "",
    context: int | None = None,
) -> Reference:
    """Generate as the target alone would, by the coupled rule (at temperature 0: greedily).

    Args:
        logits_of: history -> float32 [vocab].
        prompt: token ids.
        context: most tokens of prompt and output together.
        decode: text of the output, for ``stop``.

    All other arguments mean what they mean in the package.

    Raises:
        DeadEndError: no token is left to choose.
    """
    output: list[int] = []
    margin = math.inf
    limit = max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))
    ends = {*eos_token_ids, *stop_token_ids}
    while len(output) < limit:
        history = [*prompt, *output]
        logits = [np.float32(value) for value in logits_of(history)]
        logits = penalized(logits, list(prompt), output, repetition_penalty, presence_penalty, frequency_penalty)
        for token, bias in dict(logit_bias).items():
            logits[token] += np.float32(bias)
        for processor in logits_processors:
            logits = [np.float32(value) for value in processor(list(history), np.array(logits, np.float32))]
        for token in range(len(logits)):
            if (allowed_token_ids is not None and token not in allowed_token_ids) or token in banned_token_ids:
                logits[token] = np.float32(-math.inf)
        if max(logits) == -math.inf:
            raise DeadEndError(len(history), margin)

        if temperature == 0.0:
            token = max(range(len(logits)), key=lambda token: (logits[token], -token))
        else:
            assert seed is not None
            law, law_margin = law_of(logits, temperature, top_k, top_p, min_p)
            noise = gumbel_noise(seed, len(history), len(logits))
            scores = [math.log(p) + noise[token] if p > 0 else -math.inf for token, p in enumerate(law)]
            best, second = sorted([*scores, -math.inf], reverse=True)[:2]
            margin = min(margin, law_margin, best - second)
            token = scores.index(best)
        output.append(token)
        if token in ends or any(string in decode(output) for string in stop):
            return Reference(output, "stop", margin)
    return Reference(output, "length", margin)


def penalized(
    logits: list[np.float32],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> list[np.float32]:
    result = list(logits)
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = value / np.float32(repetition) if value > 0 else value * np.float32(repetition)
        value = value - np.float32(frequency) * np.float32(output.count(token))
        if token in output:
            value = value - np.float32(presence)
        result[token] = value
    return result


def law_of(
    logits: list[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[float], float]:
    """Probabilities, and how near a filter came to keeping one token more or less."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    peak = float(logits[order[0]])
    weight = {token: math.exp((float(logits[token]) - peak) / temperature) for token in order}
    margin = math.inf
    if top_p < 1.0:
        total, mass, kept = sum(weight.values()), 0.0, []
        for token in order:
            margin = min(margin, abs(mass / total - top_p))
            if mass / total >= top_p:
                break
            kept.append(token)
            mass += weight[token]
        order = kept
    if min_p > 0.0:
        margin = min([margin, *(abs(weight[token] - min_p) for token in order[1:])])
        order = [token for token in order if weight[token] >= min_p]
    total = sum(weight[token] for token in order)
    return [weight[token] / total if token in order else 0.0 for token in range(len(logits))], margin


def gumbel_noise(seed: int, position: int, vocab: int) -> list[float]:
    """Gumbel noise of one position: Philox keyed by the seed, counter (index, position, stream, 0).

    Two tokens share a 64-bit word, the even one its low half. The top 24 of a token's 32 bits give u; where they are
    all zero, the other 8 and 53 bits of a second series give the distance from one.
    """
    words = philox(seed, 0, position, (vocab + 1) // 2)
    bits = [words[token // 2] >> (32 * (token % 2)) & 0xFFFFFFFF for token in range(vocab)]
    small = [token for token in range(vocab) if bits[token] >> 24 == 0]
    extra = dict(zip(small, philox(seed, EXTRA_BITS, position, len(small)), strict=True))
    noise = []
    for token in range(vocab):
        if token in extra:
            w = (bits[token] + ((extra[token] >> 11) + 0.5) / 2**53) / 2**32
        else:
            w = (bits[token] >> 8) / 2**24
        minus_log_u = -math.log1p(-w) if w < 1 else math.inf
        noise.append(-math.log(minus_log_u))
    return noise


def philox(seed: int, index: int, position: int, count: int) -> list[int]:
    counter = np.array([index, position, GUMBEL_STREAM, 0], np.uint64)
    generator = np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64), counter=counter)
    return [int(word) for word in generator.random_raw(count)]
