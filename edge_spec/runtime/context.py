"""What a drafter may know about the text it continues."""

from __future__ import annotations

from dataclasses import dataclass

from edge_spec.runtime.sampling import SamplingParams


@dataclass
class Context:
    """The text so far and how it is being sampled.

    Attributes:
        tokens: prompt and everything emitted, in order. It only grows.
        sampling: parameters of the request, with a seed unless they are greedy.
    """

    tokens: list[int]
    sampling: SamplingParams
