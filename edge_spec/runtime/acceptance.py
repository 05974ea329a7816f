"""How likely a draft token is to be accepted, learned from what speaks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edge_spec.runtime.proposal import Evidence

# What is expected of a drafter of which nothing is known yet: rather too little, since those that cost next to nothing
# are watched even where their tokens are not proposed.
_PRIOR = 0.25
# How many observations the broader evidence is worth where the narrower has none.
_PRIOR_WEIGHT = 4.0
# How many observations of an evidence count; of a broader one twice as many, and so on.
_MEMORY = 50
_MOST_COUNTERS = 4096


class AcceptanceTable:
    """Decayed Beta counters for every evidence, and for all that begins like it.

    An evidence names the drafter first and then goes from the broad to the narrow, so where (drafter, a, b) was seen
    seldom, (drafter, a) says what to expect, and failing that (drafter,).
    """

    def __init__(self, priors: Mapping[Evidence, float] | None = None) -> None:
        """Start without experience; ``priors`` say what to expect of some evidence, and of all that begins like it."""
        self._priors = dict(priors or {})
        self._counters: dict[Evidence, tuple[float, float]] = {}  # accepted, verified
        self._estimates: dict[Evidence, float] = {}

    def estimate(self, evidence: Evidence) -> float:
        """The probability that a token is accepted if all before it are, strictly between 0 and 1."""
        estimate = self._estimates.get(evidence)
        if estimate is None:
            accepted, verified = self._counters.get(evidence, (0.0, 0.0))
            broader = self._priors.get(evidence)
            if broader is None:
                broader = self.estimate(evidence[:-1]) if len(evidence) > 1 else _PRIOR
            estimate = (accepted + _PRIOR_WEIGHT * broader) / (verified + _PRIOR_WEIGHT)
            self._estimates[evidence] = estimate
        return estimate

    def record(self, observations: Iterable[tuple[Evidence, bool]]) -> None:
        """Learn which tokens were accepted, of those whose predecessors all were."""
        counters = self._counters
        for evidence, kept in observations:
            for width in range(1, len(evidence) + 1):
                key = evidence[:width]
                accepted, verified = counters.get(key, (0.0, 0.0))
                decay = 1.0 - 1.0 / (_MEMORY << (len(evidence) - width))
                counters[key] = (decay * accepted + kept, decay * verified + 1.0)
        while len(counters) > _MOST_COUNTERS:  # an app's drafter may see ever new evidence
            del counters[next(iter(counters))]
        self._estimates.clear()
