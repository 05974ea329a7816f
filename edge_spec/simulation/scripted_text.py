"""Texts of which everything is settled beforehand: what they say, and where a draft model would be right.

So every way of drafting can be tried on the very same text, and the same seed gives the same text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# How far the draft's chances lie apart: those of a beta law with this sum of parameters, so mostly near 0 and near 1.
_SHARPNESS = 1.5
# Tokens of a passage that is copied, on average, and how often the draft model is right in one.
_PASSAGE = 24
_RIGHT_IN_PASSAGES = 0.9
_LEAST_SHARE = 1e-6
# Fresh tokens are drawn from so many, the n-th of them 1/n times as often as the first.
_WORDS = 5000
# Positions at which a calibration has seen draft and target side by side.
_CALIBRATION = 24


@dataclass(frozen=True)
class Scenario:
    """A kind of text.

    Attributes:
        acceptance: share of its fresh tokens at which the draft model is right.
        copied: share of the answer that repeats passages of the prompt.
    """

    acceptance: float
    copied: float


@dataclass(frozen=True)
class ScriptedText:
    """A text, its prompt first.

    Attributes:
        tokens: all of them.
        prompt_length: how many belong to the prompt.
        chances: float64 [tokens], the probability that the draft model gives to its own choice there.
        right: bool [tokens], whether that choice is the text's.
        agreement: the same pairs from another text, as a calibration finds them.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    chances: NDArray[np.float64]
    right: NDArray[np.bool_]
    agreement: tuple[tuple[float, bool], ...]

    @classmethod
    def write(cls, scenario: Scenario, prompt_length: int, length: int, seed: int) -> ScriptedText:
        """Write a text.

        Args:
            scenario: what kind of text it is.
            prompt_length: tokens of the prompt.
            length: tokens of prompt and answer.
            seed: the same gives the same text.
        """
        random = np.random.default_rng(seed)
        ranks = 1.0 / np.arange(1, _WORDS + 1)
        tokens = random.choice(_WORDS, length, p=ranks / ranks.sum())
        passages = _passages(random, scenario.copied, prompt_length, length)
        for start, end, source in passages:
            tokens[start:end] = tokens[source : source + end - start]
        copied = np.zeros(length, bool)
        for start, end, _ in passages:
            copied[start + 1 : end] = True  # that a passage begins is not foreseen
        chances = np.where(
            copied, _chances(random, _RIGHT_IN_PASSAGES, length), _chances(random, scenario.acceptance, length)
        )
        right = random.random(length) < chances
        known = _chances(random, scenario.acceptance, _CALIBRATION)
        agreed = random.random(_CALIBRATION) < known
        return cls(
            tuple(int(token) for token in tokens),
            prompt_length,
            chances,
            right,
            tuple((float(chance), bool(agrees)) for chance, agrees in zip(known, agreed, strict=True)),
        )

    def drafted(self, position: int) -> int:
        """The token that the draft model proposes at a position, if all before it are the text's."""
        token = self.tokens[position]
        return token if self.right[position] else token + 1


def _chances(random: np.random.Generator, mean: float, count: int) -> NDArray[np.float64]:
    if not 0.0 < mean < 1.0:
        return np.full(count, mean)
    return random.beta(_SHARPNESS * mean, _SHARPNESS * (1.0 - mean), count)


def _passages(random: np.random.Generator, share: float, prompt_length: int, length: int) -> list[tuple[int, int, int]]:
    """Start and end of passages in the answer, and where in the prompt they come from."""
    passages: list[tuple[int, int, int]] = []
    # Tokens from one passage to the next, on average.
    fresh = max(1.0, _PASSAGE * (1.0 - share) / max(share, _LEAST_SHARE))
    at = prompt_length if share > 0.0 else length
    while (at := at + int(random.geometric(1.0 / fresh))) < length:
        end = min(length, at + int(random.geometric(1.0 / _PASSAGE)), at + prompt_length)
        passages.append((at, end, int(random.integers(0, prompt_length - (end - at) + 1))))
        at = end
    return passages
