"""From answers to figures: speeds, acceptance and speedups with intervals. Pure functions of the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.bench.measurement import Answer
from edge_spec.bench.modes import BASELINE, PLAIN

RESAMPLES = 4000
_SEED = 0


@dataclass(frozen=True)
class Speedup:
    """How many times as fast, and the bounds of the 95% interval; these are ``None`` for a single question."""

    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Figures:
    """What one mode did in one category. Times are in seconds; shares are of the time spent in rounds.

    Attributes:
        questions, answers: how many there were; a question has an answer for each turn and repetition.
        identical: answers with the tokens of plain decoding; ``None`` for another bundle.
        new_tokens: tokens emitted.
        mean_accepted_length: tokens emitted per target call.
        acceptance_rate: share of the drafted tokens that were emitted.
        acceptance_by_position: the same by position in the proposal.
        tokens_per_second: decoding speed, after each answer's first round.
        ttft_seconds: mean time to the first token.
        draft_share, verify_share, overhead_share: where the rounds' time went.
        decode_speedup: against plain decoding, time per token after the first round.
        request_speedup: against plain decoding, time per token of whole requests, prompt included.
        decode_speedup_over_baseline, request_speedup_over_baseline: the same against the other bundle.
    """

    questions: int
    answers: int
    identical: int | None
    new_tokens: int
    mean_accepted_length: float
    acceptance_rate: float
    acceptance_by_position: list[float]
    tokens_per_second: float
    ttft_seconds: float
    draft_share: float
    verify_share: float
    overhead_share: float
    decode_speedup: Speedup | None
    request_speedup: Speedup | None
    decode_speedup_over_baseline: Speedup | None
    request_speedup_over_baseline: Speedup | None


@dataclass(frozen=True)
class Summary:
    """Figures by mode, overall and by category."""

    overall: dict[str, Figures]
    categories: dict[str, dict[str, Figures]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)


def summarize(answers: Sequence[Answer]) -> Summary:
    """Summarize answers in which every mode met the same turns.

    Args:
        answers: of one run; plain decoding among the modes.
    """
    by_category: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_category[answer.category].append(answer)
    return Summary(_by_mode(answers), {category: _by_mode(part) for category, part in by_category.items()})


def decode_speedup(answers: Sequence[Answer], base: str, mode: str) -> Speedup | None:
    """How many times as fast one mode decodes as another, after each answer's first round."""
    both = [[answer for answer in answers if answer.mode == name] for name in (base, mode)]
    return speedup(*(_costs(part, _decoding) for part in both))


def speedup(base: NDArray[np.float64], other: NDArray[np.float64]) -> Speedup | None:
    """Compare seconds per token: sums over all questions, and a bootstrap that draws questions with replacement.

    Where both emitted the same tokens this is the ratio of the summed times.

    Args:
        base: float64 [questions, 2], seconds and tokens of each question.
        other: the same of the same questions, row by row.

    Returns:
        The ratio, with the percentiles 2.5 and 97.5 of the resampled ratios; ``None`` if there is nothing to divide by.
    """
    ratio = _ratio(base.sum(axis=0), other.sum(axis=0))
    if not np.isfinite(ratio):
        return None
    if len(base) < 2:
        return Speedup(float(ratio), None, None)
    # How often each question is drawn, so that a resample is a product instead of a copy.
    count = len(base)
    draws = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    ratios = _ratio(draws @ base, draws @ other)
    low, high = np.percentile(ratios[np.isfinite(ratios)], (2.5, 97.5))
    return Speedup(float(ratio), float(low), float(high))


def _ratio(base: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the seconds per token; [..., 2] to [...], NaN where a side has no tokens or no time."""
    measured = (base > 0).all(axis=-1) & (other > 0).all(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (base[..., 0] * other[..., 1]) / (base[..., 1] * other[..., 0])
    return np.where(measured, ratio, np.nan)


def _by_mode(answers: Sequence[Answer]) -> dict[str, Figures]:
    modes: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        modes[answer.mode].append(answer)
    return {mode: _figures(mode, modes) for mode in modes}


def _figures(mode: str, modes: dict[str, list[Answer]]) -> Figures:
    answers = modes[mode]

    def total(name: str) -> Any:
        return sum(answer.statistics[name] for answer in answers)

    def against(base: str, cost: Callable[[Answer], tuple[float, int]]) -> Speedup | None:
        if mode == base or base not in modes:
            return None
        return speedup(_costs(modes[base], cost), _costs(answers, cost))

    drafted = _by_position([answer.statistics["drafted_by_position"] for answer in answers])
    accepted = _by_position([answer.statistics["accepted_by_position"] for answer in answers])
    seconds, tokens = _costs(answers, _decoding).sum(axis=0)
    parts = [total(f"{part}_seconds") for part in ("draft", "verify", "overhead")]
    shares = [_quotient(part, sum(parts)) for part in parts]
    return Figures(
        questions=len({answer.line for answer in answers}),
        answers=len(answers),
        identical=None if mode == BASELINE else sum(bool(answer.identical) for answer in answers),
        new_tokens=total("new_tokens"),
        mean_accepted_length=_quotient(total("new_tokens"), total("rounds")),
        acceptance_rate=_quotient(total("accepted"), total("drafted")),
        acceptance_by_position=[_quotient(*pair) for pair in zip(accepted, drafted, strict=True)],
        tokens_per_second=_quotient(tokens, seconds),
        ttft_seconds=total("ttft_seconds") / len(answers),
        draft_share=shares[0],
        verify_share=shares[1],
        overhead_share=shares[2],
        decode_speedup=against(PLAIN, _decoding),
        request_speedup=against(PLAIN, _request),
        decode_speedup_over_baseline=against(BASELINE, _decoding),
        request_speedup_over_baseline=against(BASELINE, _request),
    )


def _costs(answers: Sequence[Answer], cost: Callable[[Answer], tuple[float, int]]) -> NDArray[np.float64]:
    """Add up what each question cost: float64 [questions, 2], seconds and tokens, by line."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for answer in answers:
        for column, value in enumerate(cost(answer)):
            sums[answer.line][column] += value
    return np.array([sums[line] for line in sorted(sums)], np.float64).reshape(-1, 2)


def _decoding(answer: Answer) -> tuple[float, int]:
    """Seconds and tokens after the first round."""
    counts = answer.statistics
    return counts["total_seconds"] - counts["ttft_seconds"], counts["new_tokens"] - counts["first_round_tokens"]


def _request(answer: Answer) -> tuple[float, int]:
    """Seconds and tokens of the whole request."""
    return answer.wall_seconds, answer.statistics["new_tokens"]


def _by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    """Add up lists of different lengths, place by place."""
    sums = [0] * max(map(len, counts), default=0)
    for part in counts:
        for position, count in enumerate(part):
            sums[position] += count
    return sums


def _quotient(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
