"""Chooses what every round proposes by what it is expected to bring and what it is measured to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from time import perf_counter

from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.candidate_tree import CandidateTree, Selection
from edge_spec.runtime.context import Context
from edge_spec.runtime.costs import Costs
from edge_spec.runtime.draft_length import pays
from edge_spec.runtime.drafters.composite import CompositeDrafter
from edge_spec.runtime.drafters.protocol import Budget, CostlyDrafter, Drafter, Outcome
from edge_spec.runtime.goodput import Goodput, ProbingCredit
from edge_spec.runtime.proposal import Evidence, Proposal, deferred_evidence
from edge_spec.runtime.speculation import Timing

# Tokens asked of drafters that cost next to nothing, of which the best are then proposed.
_CANDIDATES = 12
# The longest chain the draft model is asked for, and the most tokens of a round where nobody says.
_LONGEST_CHAIN = 16
_MOST_ROWS = 63
# Over how many tokens the cost of reading what the draft has missed is spread, at least, and how many a round brings. A
# text is expected to go on for as long as it has already.
_SHORTEST_HORIZON = 32
_TOKENS_A_ROUND = 3
# What an accepted token on a branch is worth where branches are deferred: it comes again in the next round, where
# another might have been accepted in its place, but it need not be drafted.
_DEFERRED_WORTH = 0.5
# Of expected and accepted tokens, what is left after a round, and how many of each are assumed beforehand.
_TRUST_DECAY = 0.95
_TRUST_PRIOR = 10.0
_LEAST_TRUST = 0.5
# Rounds between two questions to free drafters that have not been worth their time.
_PARKED_ROUNDS = 8


class Controller:
    """Maximizes measured goodput, round by round.

    With lambda the text's current speed in tokens per second, an option that costs C seconds more than a plain step
    and is expected to bring G more tokens is worth G - lambda C (the renewal-reward argument: time spent here is time
    not spent at the average speed). Proposing nothing is worth 0. G is the sum, over the proposed tokens, of the
    probability that a token and all before it are accepted; C comes from measured cost curves.

    Drafters that cost next to nothing are asked every round. The draft model is asked if a chain from it promises
    more than they do, and stops where the next token is no longer expected to pay.

    While other texts wait for their turn, time is theirs as well: it is weighed by the speed of the whole engine if
    that is the larger one, what the draft has to catch up with has to pay at once, and nothing is tried for the sake
    of knowing.
    """

    def __init__(
        self,
        costs: Costs,
        acceptance: AcceptanceTable,
        credit: ProbingCredit,
        free: Sequence[Drafter] = (),
        model: CostlyDrafter | None = None,
        most: int = _MOST_ROWS,
        branches: bool = True,
        defer: bool = True,
        clock: Callable[[], float] = perf_counter,
        everybody: Goodput | None = None,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        """Control a request.

        Args:
            costs: what calls of target and draft take.
            acceptance: what became of earlier draft tokens; learns from every round.
            credit: what may be spent on probing; grows with time.
            free: drafters that cost next to nothing.
            model: the draft model's drafter, or the head's, if it may be used.
            most: most draft tokens in a round.
            branches: whether proposals may be trees.
            defer: whether tokens on branches are proposed again rather than committed.
            clock: tells the time, in seconds.
            everybody: the speed of all texts together.
            waiting: how many other texts wait for their turn.
        """
        self._everybody = everybody
        self._waiting = waiting
        self._others_wait = False
        self._costs = costs
        self._acceptance = acceptance
        self._credit = credit
        self._goodput = Goodput(1.0 / costs.verify(1, 0))
        self._free = CompositeDrafter(free, acceptance)
        self._model = model
        self._most = most
        self._branches = branches
        self._off_trunk = _DEFERRED_WORTH if defer else 1.0
        self._clock = clock
        self._candidates = CandidateTree()
        # Moving averages of what asking the free drafters brings and costs, in tokens and seconds.
        self._free_gain, self._free_seconds = 1.0, 0.0
        # Moving sums of the draft tokens that were expected to be accepted, and that were.
        self._expected = self._accepted = 0.0
        self._rounds = 0
        self._rate = self._goodput.rate  # lambda
        self._room = most  # tokens that the text may still grow by

    def propose(self, context: Context, guess: tuple[int, ...], most: int) -> Proposal:
        """The proposal with the largest expected gain; none, if a plain step is best."""
        self._rounds += 1
        self._room = most
        most = min(most, self._most)
        guess = guess[:most]
        past = len(context.tokens) - 1
        # Plain decoding is always to be had.
        self._rate = max(self._goodput.rate, 1.0 / self._costs.verify(1, past))
        self._others_wait = self._waiting() > 0
        if self._others_wait and self._everybody is not None:
            self._rate = max(self._rate, self._everybody.rate)
        cost = self._row_cost(past)
        candidates = CandidateTree()
        if guess:
            candidates.add(Proposal().after(guess))
        best = self._select(candidates, cost, most)
        if len(guess) < most and self._free.drafters and self._worth_asking_free():
            started, without = self._clock(), best.gain
            self._free.collect(candidates, context, Budget(_CANDIDATES, self._branches), guess, guess)
            best = self._select(candidates, cost, most)
            self._free_seconds += 0.1 * (self._clock() - started - self._free_seconds)
            self._free_gain += 0.1 * (best.gain - without - self._free_gain)
        if self._model is not None and self._model.ready and len(guess) < most:
            tokens = self._worth_drafting(self._model, context, guess, most - len(guess), best.gain)
            if tokens:
                candidates = self._draft(self._model, tokens, context, guess, candidates)
                best = self._select(candidates, cost, most)
        self._candidates = candidates
        self._expected += best.accepted
        return best.proposal

    def observe(self, outcome: Outcome, emitted: int, timing: Timing) -> None:
        """Learn from a round what tokens are worth and what calls cost."""
        told = (*(outcome.proposal.tokens[node] for node in outcome.path), outcome.next_token)
        # Also of candidates that were not proposed it is known by now whether they were right.
        self._acceptance.record(self._candidates.compared_with(told))
        self._expected *= _TRUST_DECAY
        self._accepted = _TRUST_DECAY * (self._accepted + len(outcome.path))
        self._costs.observe_overhead(timing.total_seconds - timing.draft_seconds - timing.verify_seconds)
        self._goodput.record(emitted, timing.total_seconds)
        if self._everybody is not None:
            self._everybody.record(emitted, timing.total_seconds)
        self._credit.grow(timing.total_seconds)
        self._free.observe(outcome)
        if self._model is not None:
            self._model.observe(outcome)

    def _trust(self) -> float:
        """How many tokens of this text were accepted for one that was expected to be.

        Acceptance is learned over all texts, and of many candidates those are proposed that seem best, which on average
        is more than they are. A time that costs lambda tokens is weighed as lambda / trust expected ones.
        """
        ratio = (self._accepted + _TRUST_PRIOR) / (self._expected + _TRUST_PRIOR)
        return min(max(ratio, _LEAST_TRUST), 1.0 / _LEAST_TRUST)

    def _select(self, candidates: CandidateTree, cost: Callable[[int], float], most: int) -> Selection:
        return candidates.select(self._acceptance.estimate, cost, most, self._branches, self._off_trunk)

    def _row_cost(self, past: int) -> Callable[[int], float]:
        """What verifying n tokens costs more than a plain step, in tokens that are expected to be accepted."""
        plain, rate = self._costs.verify(1, past), self._rate / self._trust()
        return lambda tokens: rate * (self._costs.verify(1 + tokens, past) - plain)

    def _worth_asking_free(self) -> bool:
        """Whether the free drafters have lately been worth the time it takes to ask them."""
        worth = self._free_gain > self._rate * self._free_seconds
        return worth or self._rounds % _PARKED_ROUNDS == 0

    def _worth_drafting(
        self, model: CostlyDrafter, context: Context, guess: tuple[int, ...], most: int, gain: float
    ) -> int:
        """How many tokens the draft model should draft at most.

        Args:
            model: the drafter in question.
            context: the text so far.
            guess: tokens that are proposed in any case.
            most: the most tokens behind them.
            gain: what can be had without the model, in tokens.

        Returns:
            0 if the model promises less than there is anyway; 1 for a probe.
        """
        past, rate = len(context.tokens) - 1, self._rate
        chances = self._chances(guess)
        surely = sum(prod(chances[: depth + 1]) for depth in range(len(chances))) - self._row_cost(past)(len(guess))
        unread, cached = model.unread(context, guess), model.cached(context, guess)
        catching_up = self._costs.draft(cached, unread) - self._costs.draft(cached, 1)
        written = len(context.tokens) - context.history.prompt_length
        rounds = max(1.0, min(self._room, max(_SHORTEST_HORIZON, written)) / _TOKENS_A_ROUND)
        if self._others_wait:
            rounds = 1.0
        most = min(most, _LONGEST_CHAIN)
        outlook, _ = self._outlook(model, context, prod(chances), 1 + len(guess), cached, most)
        if surely + outlook - rate * catching_up / rounds > gain:
            return most
        if self._others_wait:
            return 0
        verifying = self._costs.verify(2 + len(guess), past) - self._costs.verify(1, past)
        return int(self._credit.spend(self._costs.draft(cached, unread) + verifying))

    def _chances(self, guess: tuple[int, ...]) -> list[float]:
        """How likely each token of the guess is to be accepted if those before it are."""
        return [self._acceptance.estimate(deferred_evidence(depth)) for depth in range(len(guess))]

    def _outlook(
        self,
        model: CostlyDrafter,
        context: Context,
        chance: float,
        rows: int,
        cached: int,
        most: int,
    ) -> tuple[float, int]:
        """What drafting goes on to bring, at best, less what it costs, in tokens; and how many to draft for that.

        Args:
            model: the drafter in question.
            context: the text so far.
            chance: that everything proposed so far is accepted.
            rows: rows the target's call has already.
            cached: tokens in the draft's cache.
            most: the most tokens to come.
        """
        rate, past = self._rate, len(context.tokens) - 1
        acceptance = self._acceptance.estimate(model.usual_evidence(context))
        step, so_far = self._costs.draft(cached, 1), self._costs.verify(rows, past)
        best = brought = 0.0
        wanted = 0
        for tokens in range(1, most + 1):
            chance *= acceptance
            brought += chance
            drafting = step * model.steps(tokens, context, self._branches)
            worth = brought - rate * (drafting + self._costs.verify(rows + tokens, past) - so_far)
            if worth > best:
                best, wanted = worth, tokens
            if brought + chance * (most - tokens) < rate * drafting:
                break  # it will not get better
        return best, wanted

    def _draft(
        self,
        model: CostlyDrafter,
        tokens: int,
        context: Context,
        guess: tuple[int, ...],
        candidates: CandidateTree,
    ) -> CandidateTree:
        """Let the model draft while it pays; its tokens, what there was before, and what the free drafters add."""
        past, cached = len(context.tokens) - 1, model.cached(context, guess)
        surely = prod(self._chances(guess))

        def ahead(chain: Sequence[Evidence]) -> int:
            chance = surely * prod(self._acceptance.estimate(reason) for reason in chain)
            rows, most = 1 + len(guess) + len(chain), tokens - len(chain)
            return self._outlook(model, context, chance, rows, cached, most)[1]

        def another(chain: Sequence[Evidence]) -> bool:
            return not chain or ahead(chain) > 0

        def worth(chain: Sequence[Evidence]) -> bool:
            chances = [surely, *(self._acceptance.estimate(reason) for reason in chain)]
            return pays(chances, self._row_cost(past), len(guess))

        drafted = model.propose(context, Budget(tokens, self._branches, another, ahead, worth), guess)
        if drafted.q is not None:
            candidates = CandidateTree()  # tokens that were drawn stand alone in their places
            candidates.add(Proposal().after(guess))
        candidates.add(drafted, guess)
        if self._free.drafters and len(drafted):
            end = (*guess, *drafted.tokens[: drafted.trunk])
            self._free.collect(candidates, context, Budget(_CANDIDATES, self._branches), end, end)
        return candidates
