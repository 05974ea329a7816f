"""How fast the text grows, and what may be spent on finding out whether it could grow faster."""

from __future__ import annotations

# What is left of a round in the average after the next one.
_DECAY = 0.95
# Share of the time that may go into probing, and the most that is saved up for it.
_PROBING = 0.01
_MOST_CREDIT = 3.0  # seconds


class Goodput:
    """A moving average of tokens per second, and a credit for probing.

    Attributes:
        rate: tokens per second.
        credit: seconds that probing may cost now. It grows by one percent of the time that passes, so probing can
            never cost more than that.
    """

    def __init__(self, rate: float) -> None:
        """Expect ``rate`` tokens per second until rounds say otherwise."""
        self.rate = rate
        self.credit = 0.0
        # The expectation counts as one round's tokens.
        self._tokens = 1.0
        self._seconds = 1.0 / rate

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a round that emitted ``tokens`` and took ``seconds``."""
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds
        self.rate = self._tokens / self._seconds
        self.credit = min(self.credit + _PROBING * seconds, _MOST_CREDIT)

    def spend(self, seconds: float) -> bool:
        """Pay for a probe, if the credit suffices."""
        if seconds > self.credit:
            return False
        self.credit -= seconds
        return True
