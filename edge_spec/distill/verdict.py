"""Whether a new draft pays: the bundle answers prompts that nobody learned from, with and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_spec.bench.engines import open_lanes
from edge_spec.bench.measurement import Answer, Skipped, measure
from edge_spec.bench.modes import parse_modes
from edge_spec.bench.summary import Figures, Speedup, decode_speedup, summarize
from edge_spec.errors import RequestError
from edge_spec.prompt_file import Question

# What is compared: the controller with the new draft, the same without, and plain decoding.
WITH, WITHOUT = "auto", "free"

_OPTIONS = {"max_new_tokens": 128, "temperature": 0.0, "seed": 0}


@dataclass(frozen=True)
class Verdict:
    """What a new draft brings.

    Attributes:
        figures: by way of decoding: plain, without the draft, with it.
        gain: how many times as fast decoding is with the draft as without it.
        identical: whether all texts were those of plain decoding.
        skipped: prompts that could not be asked.
    """

    figures: dict[str, Figures]
    gain: Speedup
    identical: bool
    skipped: int

    @property
    def pays(self) -> bool | None:
        """Whether the draft makes answers faster; ``None`` if the measurement cannot tell."""
        if self.gain.low is None or self.gain.high is None:
            return None
        return True if self.gain.low > 1 else False if self.gain.high < 1 else None

    def sentence(self) -> str:
        """What to make of it."""
        gain = self.gain
        spread = "" if gain.low is None else f" (95 % interval {gain.low:.2f} to {gain.high:.2f})"
        plain = self.figures[WITH].decode_speedup
        times = f"{gain.ratio:.2f} times the speed of the drafters that need no model{spread}"
        if plain is not None:
            times += f", {plain.ratio:.2f} times that of plain decoding"
        if self.pays:
            return f"The draft pays: {times}."
        if self.pays is None:
            count = self.figures[WITH].answers
            return (
                f"Whether the draft pays cannot be told from {count} answers: {times}. 'edge-spec bench' measures more "
                "prompts."
            )
        return (
            f"The draft does not pay on these prompts: {times}. It costs nothing but its memory, since it is only used "
            "where it is expected to help; train it longer or on more text of your own, or leave it out."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**asdict(self), "pays": self.pays, "sentence": self.sentence()}


def judge(
    bundle: Path,
    questions: Sequence[Question],
    loading: dict[str, Any],
    answered: Callable[[int, int], None] = lambda done, planned: None,
) -> Verdict:
    """Measure, every question in every way before the next one.

    Args:
        bundle: with the draft.
        questions: to ask.
        loading: arguments of :func:`edge_spec.load`.
        answered: told how many answers there are, and how many there will be.

    Raises:
        RequestError: no question could be asked.
        EdgeSpecError: the bundle cannot be loaded.
    """
    modes = parse_modes(f"{WITHOUT},{WITH}")
    done, planned = 0, len(questions) * len(modes)

    def count(more: int) -> None:
        nonlocal done
        done += more
        answered(done, planned)

    answers: list[Answer] = []
    skipped: list[Skipped] = []
    count(0)
    with open_lanes(bundle, modes, None, loading, _OPTIONS) as lanes:
        for result in measure(lanes, questions, _OPTIONS, 0, count):
            if isinstance(result, Skipped):
                skipped.append(result)
            else:
                answers.extend(result)
    if not answers:
        reason = skipped[0].reason if skipped else "there is none"
        raise RequestError(f"no prompt could be asked to measure the draft: {reason}")
    gain = decode_speedup(answers, WITHOUT, WITH)
    if gain is None:
        raise RequestError("every answer ended with its first token, so there is nothing to compare; ask other prompts")
    return Verdict(summarize(answers).overall, gain, all(answer.identical for answer in answers), len(skipped))
