"""What a generation cost and what speculation brought it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from edge_spec.runtime.loop import Round
from edge_spec.runtime.pressure import MemoryEvent


class AcceptanceFigures:
    """What follows from the counts of one generation, or of many."""

    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per target call, the target's own included; 1 without speculation, 0 before the first."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed tokens that were emitted; 0 if nothing was proposed."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the rounds that proposed a token at each position that emitted one there."""
        return [
            accepted / drafted
            for accepted, drafted in zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        ]


@dataclass
class Statistics(AcceptanceFigures):
    """Counts and times of one generation. What lies behind the end of the text does not count; times are in seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: how many of them were in the cache already.
        waiting_seconds: while other texts had their turns; no part of the other times.
        seed: what the noise was keyed by; ``None`` if no noise was used.
        new_tokens: tokens emitted, the end-of-text token included.
        first_round_tokens: how many of them the first round brought.
        rounds: target calls that emitted tokens.
        plain_rounds: how many of them proposed nothing.
        drafted: draft tokens proposed, up to the end of the text.
        accepted: draft tokens emitted.
        deferred: tokens that a branch told, and that the next round proposed again (docs/exactness.md).
        drafted_by_position: rounds that proposed a token at this position behind the text, from 0.
        accepted_by_position: rounds that emitted a draft token there.
        accepted_by_drafter: draft tokens emitted, by who proposed them.
        ttft_seconds: what the prompt and the first round took, and so the time to the first token if nobody waits.
        prefill_seconds: spent on the prompt before the first round.
        draft_seconds, verify_seconds, overhead_seconds: where the rounds' time went.
        total_seconds: prefill and rounds; what the caller does between chunks is not in it.
        memory_events: what was given up meanwhile for want of memory, and what came back.
    """

    prompt_tokens: int
    seed: int | None = None
    reused_tokens: int = 0
    waiting_seconds: float = 0.0
    new_tokens: int = 0
    first_round_tokens: int = 0
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    deferred: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    ttft_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    total_seconds: float = 0.0
    memory_events: list[MemoryEvent] = field(default_factory=list)

    def record_prefill(self, seconds: float) -> None:
        """Add the time spent on the prompt before the first round."""
        self.prefill_seconds += seconds
        self.total_seconds += seconds

    def record(self, round_: Round, emitted: int) -> None:
        """Add a round.

        Args:
            round_: what the target call brought.
            emitted: how many of its tokens were used; the rest lay behind the end of the text.
        """
        timing = round_.timing
        self.total_seconds += timing.total_seconds
        if not self.rounds:
            self.ttft_seconds, self.first_round_tokens = self.total_seconds, emitted
        accepted = min(emitted, round_.accepted)
        whole = emitted == len(round_.tokens)
        drafted, depth = (round_.drafted, round_.depth) if whole else (accepted, accepted)
        self.new_tokens += emitted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.deferred += round_.deferred if whole else 0
        self.plain_rounds += not round_.drafted
        if depth > len(self.drafted_by_position):
            unseen_positions = [0] * (depth - len(self.drafted_by_position))
            self.drafted_by_position += unseen_positions
            self.accepted_by_position += unseen_positions
        for position in range(depth):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
        for origin in round_.origins[:accepted]:
            self.accepted_by_drafter[origin] = self.accepted_by_drafter.get(origin, 0) + 1
        self.draft_seconds += timing.draft_seconds
        self.verify_seconds += timing.verify_seconds
        self.overhead_seconds += timing.total_seconds - timing.draft_seconds - timing.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first round, by the time they took; 0 if there were none."""
        seconds = self.total_seconds - self.ttft_seconds
        return (self.new_tokens - self.first_round_tokens) / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return counts, times and the figures derived from them, ready for JSON."""
        derived = ("mean_accepted_length", "acceptance_rate", "acceptance_by_position", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def add_elementwise(one: list[int], other: list[int]) -> list[int]:
    """Sums of the elements of two lists; the shorter one goes on with zeros."""
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
