"""What a drafter and a verification rule may know about the text they continue."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_spec.runtime.history import History
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.noise import Noise
from edge_spec.runtime.sampling_params import SamplingParams


@dataclass(eq=False)
class Context:
    """The text so far and how it is being sampled.

    Attributes:
        tokens: prompt and everything emitted, in order; rounds append to it.
        sampling: parameters of the request, its seed resolved to an integer unless it is greedy.
        pipeline: what happens to logits before temperature.
        coupled: whether draft tokens are to be chosen with the target's own Gumbel noise.
        history: the same tokens, counted.
        noise: keyed by the request's seed; ``None`` for a greedy request.
    """

    tokens: list[int]
    sampling: SamplingParams
    pipeline: LogitsPipeline = field(default_factory=lambda: LogitsPipeline(SamplingParams()))
    coupled: bool = True

    def __post_init__(self) -> None:
        self.history = History(self.tokens)
        self.noise = None if self.sampling.greedy or self.sampling.seed is None else Noise(self.sampling.seed)
