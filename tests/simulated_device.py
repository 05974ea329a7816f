"""A device that only exists as cost curves: a target, a draft model and a clock that their calls move on.

The text is a row of zeros. At every position it is settled beforehand whether the draft model is right there, and what
it thinks of its chances, so that every way of drafting can be tried on the very same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.context import Context
from edge_spec.runtime.controller import Controller
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.goodput import ProbingCredit
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import Timing

# What the draft takes to read a token along with others, as a share of a step.
CATCHING_UP = 0.3

NO_LOGITS = np.zeros((0, 0), np.float32)


@dataclass
class Device:
    """Seconds of a target call by rows, and of a draft step; ``now`` moves on with every call.

    One call can draft as many tokens as ``chains`` says, each for ``chain_step`` of a step.
    """

    verify: dict[int, float]
    step: float
    now: float = 0.0
    chains: tuple[int, ...] = ()
    chain_step: float = 1.0

    def verify_seconds(self, rows: int) -> float:
        known = sorted(self.verify)
        return float(np.interp(max(rows, known[0]), known, [self.verify[count] for count in known]))

    def draft_seconds(self, tokens: int) -> float:
        """Seconds for so many draft tokens, in calls that are as long as possible."""
        for length in sorted(self.chains, reverse=True):
            if length <= tokens:
                return length * self.step * self.chain_step + self.draft_seconds(tokens - length)
        return tokens * self.step

    def costs(self) -> Costs:
        """What a calibration of this device would find."""
        rows = sorted(self.verify)
        target = CostCurve(tuple(rows), tuple(self.verify[count] for count in rows), (0.0,) * len(rows))
        step = max(self.step, 1e-9)
        draft = CostCurve((1, 64), (step, step * (1 + 63 * CATCHING_UP)), (0.0, 0.0))
        return Costs(CallCosts(target), CallCosts(draft), 0.0, self.chain_step if self.chains else 1.0)


@dataclass
class Text:
    """Where the draft model is right, and the probability of that, of which the drafter knows."""

    right: np.ndarray
    chance: np.ndarray

    @classmethod
    def of_mean(cls, acceptance: float, length: int, seed: int) -> Text:
        random = np.random.default_rng(seed)
        sharpness = 1.5
        chance = random.beta(sharpness * acceptance, sharpness * (1 - acceptance), length + 100)
        return cls(random.random(length + 100) < chance, chance)


@dataclass
class SimulatedDraft:
    """The draft model's drafter on a device."""

    device: Device
    text: Text
    name: str = "model"
    memory_bytes: int = 0
    ready: bool = True
    read: int = 0

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        return self.device.draft_seconds(tokens) / max(self.device.step, 1e-9)

    def usual_evidence(self, context: Context) -> tuple[str | int, ...]:
        return ("model", "greedy", 0)

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        return max(1, min(len(context.tokens) + len(prefix) - self.read, 32))

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        return len(context.tokens) + len(prefix)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        start = len(context.tokens) + len(prefix)
        self.device.now += self.device.step * CATCHING_UP * (self.unread(context, prefix) - 1)
        chain: list[tuple[int, tuple[str | int, ...]]] = []
        while len(chain) < budget.tokens and budget.another([evidence for _, evidence in chain]):
            most = min(budget.tokens - len(chain), budget.ahead([evidence for _, evidence in chain]))
            at_once = max((length for length in self.device.chains if length <= most), default=1)
            self.device.now += self.device.draft_seconds(at_once)
            for where in range(start + len(chain), start + len(chain) + at_once):
                token = 0 if self.text.right[where] else 1
                chain.append((token, ("model", "greedy", 0, int(self.text.chance[where] * 10))))
        self.read = start + len(chain)
        return Proposal(tuple(token for token, _ in chain), evidence=tuple(evidence for _, evidence in chain))

    def observe(self, outcome: Outcome) -> None:
        pass

    def rollback(self, length: int) -> None:
        self.read = min(self.read, length)


@dataclass
class FreeDraft:
    """A drafter that costs nothing, and is right with a fixed chance."""

    right: np.ndarray
    length: int = 8
    name: str = "free"
    memory_bytes: int = 0
    asked: int = field(default=0)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        self.asked += 1
        start = len(context.tokens) + len(prefix)
        count = min(self.length, budget.tokens)
        tokens = tuple(0 if self.right[start + index] else 2 for index in range(count))
        return Proposal(tokens, evidence=tuple(("free", min(index, 3)) for index in range(count)))

    def observe(self, outcome: Outcome) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def fixed_speed(device: Device, text: Text, tokens: int, drafted: int) -> float:
    """Tokens per second if every round drafts the same number of tokens."""
    length, seconds = 1, 0.0
    while length < tokens:
        right = text.right[length : length + drafted]
        length += sum(1 for _ in takewhile(bool, right)) + 1
        seconds += device.verify_seconds(1 + drafted) + device.draft_seconds(drafted)
    return length / seconds


def controlled_speed(
    device: Device, text: Text, tokens: int, free: Sequence[FreeDraft] = (), with_model: bool = True
) -> float:
    """Tokens per second if the controller decides; of the draft it knows what a calibration finds out."""
    costs = device.costs()
    acceptance = AcceptanceTable()
    if with_model:
        acceptance.record(
            (("model", "greedy", 0, int(text.chance[where] * 10)), bool(text.right[where])) for where in range(-24, 0)
        )
    started = device.now
    controller = Controller(
        costs,
        acceptance,
        ProbingCredit(),
        free,
        SimulatedDraft(device, text) if with_model else None,  # type: ignore[arg-type]
        clock=lambda: device.now,
    )
    context = Context([0], SamplingParams())
    while len(context.tokens) < tokens:
        before = device.now
        proposal = controller.propose(context, (), tokens)
        drafted = device.now
        device.now += device.verify_seconds(1 + len(proposal))
        path: list[int] = []
        children = proposal.children
        row = 0
        while True:
            child = next((node for node in children[row] if proposal.tokens[node] == 0), None)
            if child is None:
                break
            path.append(child)
            row = child + 1
        timing = Timing(
            1 + len(proposal), len(context.tokens) - 1, drafted - before, device.now - drafted, device.now - before
        )
        costs.observe_verify(timing.rows, timing.past, timing.verify_seconds)
        context.tokens.extend([0] * (len(path) + 1))
        controller.observe(Outcome(0, proposal, tuple(path), 0, NO_LOGITS), len(path) + 1, timing)
    return len(context.tokens) / (device.now - started)
