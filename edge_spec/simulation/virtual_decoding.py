"""Decoding in virtual time: the real controller, costs and suffix drafter, on a scripted text.

A call of a model takes no time but moves the clock on by what its cost curve says.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.context import Context
from edge_spec.runtime.controller import Controller
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.costs import CallCosts, Costs
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.model_choice import EDGES, PRIORS, evidence_of, usual_evidence
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.drafters.suffix import SuffixDrafter
from edge_spec.runtime.goodput import ProbingCredit
from edge_spec.runtime.proposal import DEFERRED, Evidence, Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import Timing
from edge_spec.simulation.scripted_text import ScriptedText

_NO_LOGITS = np.zeros((0, 0), np.float32)


@dataclass
class Clock:
    """Virtual time in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@dataclass(frozen=True)
class VirtualRun:
    """What decoding a text took.

    Attributes:
        tokens: tokens of the answer but the first, which comes with the prompt.
        seconds: what they took.
        plain_seconds: what they would have taken without speculation.
        rounds: calls of the target.
        drafted: rounds by how many tokens they proposed.
        accepted: proposed tokens that were kept.
    """

    tokens: int
    seconds: float
    plain_seconds: float
    rounds: int
    drafted: Counter[int]
    accepted: int

    @property
    def speedup(self) -> float:
        """How many times as fast as plain decoding."""
        return self.plain_seconds / self.seconds


class ScriptedDraft(ModelDrafter):
    """The draft model's drafter, where what the model says is settled by the text and its calls move a clock on."""

    def __init__(self, text: ScriptedText, curve: CostCurve, costs: Costs, clock: Clock) -> None:
        """Draft for a text, with calls that cost what ``curve`` says, of which ``costs`` learn."""
        self._text = text
        self._truth = Costs(CallCosts(curve), CallCosts(curve), 0.0)  # learns nothing
        self._costs = costs
        self._now = clock
        self._known = 0  # tokens in the cache
        self._began = 0  # where the last proposal began

    @property
    def ready(self) -> bool:
        """It is always there."""
        return True

    @property
    def memory_bytes(self) -> int:
        """It holds none."""
        return 0

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """Each of its tokens takes a call of its own."""
        return tokens

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known."""
        return usual_evidence(context)

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """Tokens that it has to read before it can propose."""
        return max(1, len(context.tokens) + len(prefix) - self._known)

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """Tokens in its cache once it has read them."""
        return len(context.tokens) + len(prefix)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """What the text says that the model would propose, for as long as it is worth going on."""
        if budget.tokens <= 0 or not budget.another(()):
            return Proposal()
        start = len(context.tokens) + len(prefix)
        reading = self.unread(context, prefix)
        chain: list[int] = []
        evidence: list[Evidence] = []
        while len(chain) < budget.tokens and (not chain or budget.another(evidence)):
            position = start + len(chain)
            if position >= len(self._text.tokens):
                break
            self._call(position - reading, reading)
            reading = 1
            chain.append(self._text.drafted(position))
            share = float(self._text.chances[position])
            evidence.append((*usual_evidence(context), bisect(EDGES, share)))
        self._began, self._known = start, start + max(0, len(chain) - 1)
        return Proposal(tuple(chain), evidence=tuple(evidence))

    def observe(self, outcome: Outcome) -> None:
        """Take back what was not accepted."""
        self._known = min(self._known, self._began + len(outcome.path))

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` on."""
        self._known = min(self._known, length)

    def _call(self, past: int, rows: int) -> None:
        seconds = self._truth.draft(past, rows)
        self._now.now += seconds
        self._costs.observe_draft(rows, past, seconds)


def decode_virtually(
    target: CostCurve, draft: CostCurve | None, round_seconds: float, text: ScriptedText, most: int
) -> VirtualRun:
    """Decode a text with speculation, and count what plain decoding would have taken.

    Args:
        target: what calls of the target cost.
        draft: what calls of the draft model cost; ``None`` without one.
        round_seconds: what a round takes besides.
        text: what is written.
        most: most tokens proposed in a round.
    """
    clock = Clock()
    truth = CallCosts(target)
    costs = Costs(CallCosts(target), None if draft is None else CallCosts(draft), round_seconds)
    acceptance = AcceptanceTable({**PRIORS, DEFERRED: 0.95})
    model = None
    if draft is not None:
        acceptance.record(evidence_of(text.agreement))
        model = ScriptedDraft(text, draft, costs, clock)
    controller = Controller(
        costs, acceptance, ProbingCredit(), (SuffixDrafter(),), model, most, branches=False, clock=clock
    )
    context = Context(list(text.tokens[: text.prompt_length + 1]), SamplingParams())
    length = len(text.tokens)
    plain = sum(truth.seconds(1, past) + round_seconds for past in range(text.prompt_length, length - 1))
    drafted: Counter[int] = Counter()
    accepted = 0
    while len(context.tokens) < length:
        started, past = clock.now, len(context.tokens) - 1
        proposal = controller.propose(context, (), length - len(context.tokens) - 1)
        proposed = clock.now
        verifying = truth.seconds(1 + len(proposal), past)
        clock.now += verifying + round_seconds
        kept = _kept(proposal, text, len(context.tokens))
        timing = Timing(1 + len(proposal), past, proposed - started, verifying, clock.now - started)
        costs.observe_verify(timing.rows, past, verifying)
        last, end = context.tokens[-1], len(context.tokens) + kept + 1
        context.tokens.extend(text.tokens[len(context.tokens) : end])
        controller.observe(
            Outcome(last, proposal, tuple(range(kept)), context.tokens[-1], _NO_LOGITS), kept + 1, timing
        )
        drafted[len(proposal)] += 1
        accepted += kept
    return VirtualRun(length - text.prompt_length - 1, clock.now, plain, drafted.total(), drafted, accepted)


def _kept(proposal: Proposal, text: ScriptedText, start: int) -> int:
    """How many tokens of a chain are the text's."""
    for depth, token in enumerate(proposal.tokens):
        if token != text.tokens[start + depth]:
            return depth
    return len(proposal.tokens)
