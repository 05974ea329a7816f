"""How fast a text grows, and what may be spent on finding out whether it could grow faster."""

from __future__ import annotations

# What is left of a round in the average after the next one.
_DECAY = 0.95
# Share of the time that may go into probing, and the most that is saved up for it, in seconds.
_PROBING = 0.01
_MOST_CREDIT = 0.3


class Goodput:
    """A moving average of tokens per second.

    Attributes:
        rate: tokens per second.
    """

    def __init__(self, rate: float) -> None:
        """Expect ``rate`` tokens per second until rounds say otherwise; the expectation counts as one round."""
        self.rate = rate
        self._tokens = 1.0
        self._seconds = 1.0 / rate

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a round that emitted ``tokens`` and took ``seconds``."""
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds
        self.rate = self._tokens / self._seconds


class ProbingCredit:
    """Seconds that may be spent on trying what is not worth it by all that is known.

    It grows by one percent of the time that passes, so in all, probing cannot cost more than that; and it does not grow
    beyond a few probes, so that no text has to pay for the time of others.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def grow(self, passed: float) -> None:
        """Add one percent of the seconds that have passed."""
        self.seconds = min(self.seconds + _PROBING * passed, _MOST_CREDIT)

    def spend(self, seconds: float) -> bool:
        """Pay for a probe, if the credit suffices."""
        if seconds > self.seconds:
            return False
        self.seconds -= seconds
        return True
