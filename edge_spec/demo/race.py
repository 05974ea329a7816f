"""Two generations of one text that share a machine evenly, and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.text_stream import TextStream


@dataclass
class Lane:
    """One way an answer comes about.

    Attributes:
        title: what the way is called.
        chunks: the generation, not yet begun.
        text_stream: turns its tokens into text.
        seconds: time spent in this lane alone, on the prompt as well.
        tokens: number of tokens so far.
        pieces: text so far, each piece with whether it was drafted and accepted.
        completion: the answer, once it is complete.
    """

    title: str
    chunks: Iterator[Chunk]
    text_stream: TextStream
    seconds: float = 0.0
    tokens: int = 0
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def tokens_per_second(self) -> float:
        """Speed so far, the time for the prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def advance(self) -> None:
        """Run one round and take its time."""
        started = perf_counter()
        chunk = next(self.chunks)
        self.seconds += perf_counter() - started
        self.tokens += len(chunk.token_ids)
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self.pieces.append((self.text_stream.push(token), origin != "target"))
        if chunk.completion is not None:
            self.pieces.append((self.text_stream.flush(), False))
            self.completion = chunk.completion


@dataclass(frozen=True)
class Outcome:
    """How the lanes of one prompt compare; speeds in tokens/s, times in seconds."""

    identical: bool
    tokens: int
    plain_seconds: float
    speculative_seconds: float
    target_calls: int

    @staticmethod
    def of(plain: Lane, speculative: Lane) -> Outcome:
        """Compare two finished lanes."""
        assert plain.completion is not None
        assert speculative.completion is not None
        return Outcome(
            identical=plain.completion.token_ids == speculative.completion.token_ids,
            tokens=speculative.tokens,
            plain_seconds=plain.seconds,
            speculative_seconds=speculative.seconds,
            target_calls=speculative.completion.statistics.rounds,
        )

    @staticmethod
    def total(outcomes: Sequence[Outcome]) -> Outcome:
        """Add up the outcomes of several prompts."""
        return Outcome(
            identical=all(outcome.identical for outcome in outcomes),
            tokens=sum(outcome.tokens for outcome in outcomes),
            plain_seconds=sum(outcome.plain_seconds for outcome in outcomes),
            speculative_seconds=sum(outcome.speculative_seconds for outcome in outcomes),
            target_calls=sum(outcome.target_calls for outcome in outcomes),
        )

    @property
    def plain_speed(self) -> float:
        """Plain decoding, prompt included."""
        return self.tokens / self.plain_seconds

    @property
    def speculative_speed(self) -> float:
        """Speculative decoding, prompt included."""
        return self.tokens / self.speculative_seconds

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target call."""
        return self.tokens / self.target_calls

    @property
    def speedup(self) -> float:
        """Ratio of the two times."""
        return self.plain_seconds / self.speculative_seconds


def race(lanes: Sequence[Lane], after_round: Callable[[], None]) -> None:
    """Run the lanes to their ends, a round at a time, always the one that has had least time.

    So whatever else slows the machine down meanwhile slows all of them.
    """
    while running := [lane for lane in lanes if lane.completion is None]:
        min(running, key=lambda lane: lane.seconds).advance()
        after_round()
