"""What a round's parts cost on this machine: measured once, then corrected by every round."""

from __future__ import annotations

import math
from typing import Any

from edge_spec.runtime.cost_curve import CostCurve

# Rows of one call while the draft model catches up; the draft's own prefill.
CHUNK_ROWS = 64

# Share of a call's surprise that the machine's speed takes on, and that the shape of the curve does.
_SPEED_GAIN = 0.1
_SHAPE_GAIN = 0.05
# A single call may be several times too slow because of somebody else on the machine. However far off it is, it counts
# as this factor; a lasting change gets through all the same, in a few dozen calls.
_CLIP = math.log(1.3)
# The first calls may find another machine than the calibration did, and so count for more.
_FIRST_CALLS = 8
_FIRST_CLIP = math.log(4.0)
# Per call, how much is forgotten of which row counts were seen, and of the shape's corrections.
_SEEN_DECAY = 0.98
_SHAPE_DECAY = 0.998
# The shape is never bent by more than this, either way.
_MOST_BEND = math.log(2.0)


class CallCosts:
    """Seconds of one model's calls: its curve as the prior, corrected by what calls take.

    Two corrections multiply the curve. The *speed* of the machine goes for all row counts and follows quickly. The
    *bend* of a row count, which its neighbours share, follows slowly. What a call says about the bend depends on how
    rare its row count is: where nearly all calls have the same rows, nothing tells a bend from a change of speed, and
    so it is taken for the latter, which leaves the ratios to the row counts nobody sees as they were measured.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        rows = range(curve.widest + 1)
        self._widest = curve.widest
        self._seconds = [curve.at(count, 0) for count in rows]
        self._growth = [curve.at(count, 1) - curve.at(count, 0) for count in rows]
        self._more = curve.at(curve.widest + 1, 0) - self._seconds[-1]
        self._more_growth = curve.at(curve.widest + 1, 1) - curve.at(curve.widest + 1, 0) - self._growth[-1]
        self._speed = 1.0
        self._calls = 0
        self._log_bend = [0.0 for _ in rows]
        self._bend = [1.0 for _ in rows]
        self._seen = [0.0 for _ in rows]
        self._seen_in_all = 0.0

    @property
    def speed(self) -> float:
        """How much longer calls take than they were measured; 1 at first."""
        return self._speed

    def seconds(self, rows: int, past: int) -> float:
        """Seconds of a call with ``rows`` rows and ``past`` tokens in the cache."""
        if rows <= self._widest:
            return (self._seconds[rows] + self._growth[rows] * past) * self._bend[rows] * self._speed
        more = rows - self._widest
        seconds = self._seconds[-1] + more * self._more + (self._growth[-1] + more * self._more_growth) * past
        return seconds * self._bend[-1] * self._speed

    def observe(self, rows: int, past: int, seconds: float) -> None:
        """Learn that a call took ``seconds``. Calls wider than any that was measured say nothing."""
        if not 1 <= rows <= self._widest or not 0.0 < seconds < math.inf:
            return
        surprise = math.log(seconds / self.seconds(rows, past))
        self._calls += 1
        clip = _FIRST_CLIP if self._calls <= _FIRST_CALLS else _CLIP
        surprise = min(max(surprise, -clip), clip)
        self._speed *= math.exp(max(_SPEED_GAIN, 1.0 / (self._calls + 1)) * surprise)
        self._seen = [seen * _SEEN_DECAY for seen in self._seen]
        self._seen[rows] += 1.0
        self._seen_in_all = self._seen_in_all * _SEEN_DECAY + 1.0
        self._bend_around(rows, _SHAPE_GAIN * surprise * (1.0 - self._seen[rows] / self._seen_in_all))

    def drift(self, factor: float) -> None:
        """Take calls for ``factor`` times as long, since other calls on the machine have become so."""
        self._speed *= factor

    def _bend_around(self, rows: int, amount: float) -> None:
        reach = 1.0 + rows / 2
        for count in range(max(1, math.ceil(rows - reach)), min(self._widest, math.floor(rows + reach)) + 1):
            bend = self._log_bend[count] * _SHAPE_DECAY + amount * (1.0 - abs(count - rows) / reach)
            bend = min(max(bend, -_MOST_BEND), _MOST_BEND)
            self._log_bend[count] = bend
            self._bend[count] = math.exp(bend)


class Costs:
    """The cost model of a pair, in seconds; asked many times a round, told about every call.

    Attributes:
        target: costs of the target's calls.
        draft_model: costs of the draft model's calls; ``None`` without one.
        overhead: seconds of a round outside the models' calls.
        chain_step: what a token costs that the draft model drafts with others in one call, in steps of their own calls.
    """

    def __init__(
        self, target: CallCosts, draft_model: CallCosts | None, overhead: float, chain_step: float = 1.0
    ) -> None:
        self.target = target
        self.draft_model = draft_model
        self.overhead = overhead
        self.chain_step = chain_step
        self._draft_is_silent = True

    def verify(self, rows: int, past: int) -> float:
        """Seconds of a target call.

        Args:
            rows: rows of the call, at least 1, which is a plain step; all of them yield logits.
            past: tokens in the cache before the call.
        """
        return self.target.seconds(rows, past)

    def draft(self, past: int, rows: int = 1) -> float:
        """Seconds in which the draft model reads ``rows`` new tokens and yields the logits after them.

        Args:
            past: tokens in its cache before.
            rows: 1 is a drafting step, more is catching up.

        Returns:
            0 without a draft model.
        """
        model = self.draft_model
        if model is None:
            return 0.0
        if rows <= CHUNK_ROWS:
            return model.seconds(rows, past)
        chunks, rest = divmod(rows, CHUNK_ROWS)
        # Chunk by chunk the past grows; linear in it, they cost as much as all at the middle.
        seconds = chunks * model.seconds(CHUNK_ROWS, past + (chunks - 1) * CHUNK_ROWS // 2)
        return seconds + (model.seconds(rest, past + chunks * CHUNK_ROWS) if rest else 0.0)

    def observe_verify(self, rows: int, past: int, seconds: float) -> None:
        """Learn what a target call took; the arguments are those of :meth:`verify`.

        What it says about the machine goes for the draft model as well, while that does not speak for itself.
        """
        before = self.target.speed
        self.target.observe(rows, past, seconds)
        if self.draft_model is not None and self._draft_is_silent:
            self.draft_model.drift(self.target.speed / before)
        self._draft_is_silent = True

    def observe_draft(self, rows: int, past: int, seconds: float, drafted: int = 1) -> None:
        """Learn what one call of the draft model took.

        Args:
            rows: tokens that it read.
            past: tokens in its cache before.
            seconds: how long it took.
            drafted: tokens that it drafted. With several it says what a step of them took: the one row that most of its
                steps have cannot be told from the others in it.
        """
        self._draft_is_silent = False
        if drafted > 1:
            rows, seconds = 1, seconds / (drafted * self.chain_step)
        if self.draft_model is not None:
            self.draft_model.observe(rows, past, seconds)

    def observe_overhead(self, seconds: float) -> None:
        """Learn what a round took outside the models' calls."""
        if 0.0 <= seconds < math.inf:
            self.overhead += _SPEED_GAIN * (min(seconds, 2 * self.overhead + 1e-5) - self.overhead)

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured, without the corrections since, ready for JSON."""
        draft = None if self.draft_model is None else self.draft_model.curve.to_dict()
        return {
            "target": self.target.curve.to_dict(),
            "draft": draft,
            "overhead": self.overhead,
            "chain_step": self.chain_step,
        }

    @classmethod
    def from_dict(cls, body: Any) -> Costs:
        """Read what :meth:`to_dict` returned. Raises ValueError if it is anything else."""
        if not isinstance(body, dict) or not {"target", "draft", "overhead", "chain_step"} <= body.keys():
            raise ValueError(f"{str(body)[:80]} are no costs")
        overhead, chain_step = body["overhead"], body["chain_step"]
        if type(chain_step) not in (int, float) or not 0.0 < chain_step < math.inf:
            raise ValueError(f"chain_step is {chain_step!r}, expected a number above 0")
        if type(overhead) not in (int, float) or not 0.0 <= overhead < math.inf:
            raise ValueError(f"overhead is {overhead!r}, expected seconds")
        draft = None if body["draft"] is None else CallCosts(CostCurve.from_dict(body["draft"]))
        return cls(CallCosts(CostCurve.from_dict(body["target"])), draft, float(overhead), float(chain_step))
