"""The round of speculative decoding: propose, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Outcome
from edge_spec.runtime.history import chain_paths, tree_paths
from edge_spec.runtime.logit_rows import LogitRows, likeliest_of
from edge_spec.runtime.logits_processors import ProcessedRows
from edge_spec.runtime.logprobs import TokenLogprobs, log_probabilities
from edge_spec.runtime.model import PREFILL_ROWS, Model
from edge_spec.runtime.proposal import UNKNOWN, Proposal
from edge_spec.runtime.speculation import Speculation, Timing
from edge_spec.runtime.target_laws import TargetLaws
from edge_spec.runtime.verification import Laws, Rule, Verdict, verify_greedy


@dataclass(frozen=True)
class Round:
    """What one target call brought.

    Attributes:
        tokens: the accepted draft tokens, then the target's own.
        origins: who proposed each of them: the name its evidence begins with, usually a drafter's; ``"ngram"`` for what
            the suffix drafter knows from other texts, ``"deferred"`` for what a branch told; or ``"target"``.
        drafted: number of tokens proposed.
        depth: length of the longest path proposed.
        deferred: number of tokens that a branch told and the next round will verify.
        logprobs: the target's log-probabilities at each of the tokens; ``None`` if they were not asked for.
        timing: where the time went.
    """

    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    drafted: int
    depth: int
    deferred: int
    logprobs: tuple[TokenLogprobs, ...] | None
    timing: Timing

    @property
    def accepted(self) -> int:
        """Number of draft tokens kept."""
        return len(self.tokens) - 1


def prefill(target: Model, context: Context, pending: int = PREFILL_ROWS) -> Iterator[None]:
    """Bring the text into the target's cache but for its last tokens, a chunk each time the iterator is advanced.

    Args:
        target: its cache holds the beginning of the text, possibly nothing.
        context: the text so far.
        pending: most tokens left for the call that follows, 1 at least.
    """
    while (unread := len(context.tokens) - target.cache.length) > pending:
        start = target.cache.length
        # Whole chunks from the first token on, where that is possible: one number of rows needs one set of buffers.
        target.prefill(context.tokens[start : start + min(PREFILL_ROWS, unread - 1)])
        yield


def decode(
    target: Model,
    speculation: Speculation | None,
    context: Context,
    rule: Rule,
    max_length: int,
    defer: bool = True,
    on_call: Callable[[int, int, float], None] = lambda rows, past, seconds: None,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Round]:
    """Run rounds until the text is ``max_length`` tokens long.

    Before every round the target's cache holds all of ``context.tokens`` but a pending end: after the first round
    just the last token. The first round drafts nothing: it carries the prompt's end, and somebody waits for the first
    token, while a drafter would have to read the whole prompt before it could propose.

    Args:
        target: the model whose text it is.
        speculation: decides what to propose; ``None`` decodes plainly.
        context: the text so far; rounds append to it.
        rule: decides which draft tokens are kept.
        max_length: tokens of prompt and output together; at most the target's context.
        defer: what becomes of tokens on a branch of a tree, whose rows may differ from plain decoding in their last
            bits. If true, the next round proposes them again, on its trunk; if not, they are committed.
        on_call: told rows, cached tokens and seconds of every call of the target whose rows all have logits.
        clock: tells the time, in seconds.

    Raises:
        LogitsError: the target's logits, or what the request makes of them, leave no token to choose.
    """
    proposal = Proposal()
    guess: tuple[int, ...] = ()
    first = True
    while len(context.tokens) < max_length:
        started = clock()
        length, past = len(context.tokens), target.cache.length
        if speculation is not None and not first:
            proposal = speculation.propose(context, guess, max_length - length - 1)
        proposed = clock()
        logits = _forward(target, context, proposal)
        answered = clock()
        verdict = _verify(logits, proposal, context, rule)
        tokens, guess = _commit(target, length, proposal, verdict, defer)
        logprobs = _logprobs(logits, verdict, tokens, context.sampling.logprobs)
        origins = _origins(proposal, verdict, len(tokens))
        last = context.tokens[-1]
        context.tokens.extend(tokens)
        timing = Timing(length - past + len(proposal), past, proposed - started, answered - proposed, clock() - started)
        if not first:
            on_call(timing.rows, past, timing.verify_seconds)
        if speculation is not None and not first:
            outcome = Outcome(last, proposal, verdict.path, verdict.next_token, logits)
            speculation.observe(outcome, len(tokens), timing)
            timing = replace(timing, total_seconds=clock() - started)
        first = False
        depth = max(proposal.depths, default=0)
        yield Round(tokens, origins, len(proposal), depth, len(guess), logprobs, timing)


def _forward(target: Model, context: Context, proposal: Proposal) -> LogitRows:
    """The target's logits behind the context (row 0) and behind every draft token."""
    pending = context.tokens[target.cache.length :]
    rows = range(len(pending) - 1, len(pending) + len(proposal))
    if proposal.is_chain:
        return target.forward([*pending, *proposal.tokens], rows)
    # A tree never travels with more than the text's last token: the first round drafts nothing.
    position = target.cache.length
    positions = [position, *(position + depth for depth in proposal.depths)]
    return target.forward([*pending, *proposal.tokens], rows, positions, proposal.ancestry())


def _verify(logits: LogitRows, proposal: Proposal, context: Context, rule: Rule, broken: int | None = None) -> Verdict:
    """Apply the rule to the rows of one target call, each row on its own path's history.

    Behind draft tokens a row may be in error that plain decoding might never have met. Then nothing that continues it
    is considered, and if the rule gets there, the round ends with the token that leads there. So the error is met, if
    at all, as the next round's first row. To drop that token as well would change how often it is emitted.

    Args:
        logits: rows [rows, vocab].
        proposal: what was proposed.
        context: the text so far.
        rule: decides.
        broken: a row that is known to be in error.
    """
    rows: Laws = logits
    if context.pipeline.active:
        tokens, parents = proposal.tokens, proposal.parents
        paths = chain_paths(tokens) if parents is None else tree_paths(tokens, parents)
        rows = ProcessedRows(context.pipeline, logits, context.history, paths)
    start = len(context.tokens)
    if context.noise is not None:
        rows = TargetLaws(rows, logits.shape[1], context.sampling)
    if broken is not None:
        rows = _StandIn(rows, broken, np.ones(logits.shape[1], np.float32))
    try:
        if context.noise is None:
            verdict = verify_greedy(rows, proposal)
        else:
            verdict = rule.verify(rows, proposal, context.noise.round(start))
    except LogitsError as error:
        if error.row == 0:
            raise error.at(start) from None
        return _verify(logits, proposal.first(error.row), context, rule, error.row)
    if broken is not None and verdict.path[-1:] == (broken - 1,):
        return Verdict(verdict.path[:-1], proposal.tokens[broken - 1])
    return verdict


class _StandIn:
    """Rows, one of which is replaced."""

    def __init__(self, rows: Laws, row: int, instead: NDArray[np.float32]) -> None:
        self._rows, self._row, self._instead = rows, row, instead

    def __getitem__(self, row: int) -> Any:
        return self._instead if row == self._row else self._rows[row]

    def likeliest(self, row: int) -> int | None:
        return None if row == self._row else likeliest_of(self._rows, row)


def _commit(
    target: Model, length: int, proposal: Proposal, verdict: Verdict, defer: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leave in the target's cache what the verdict keeps of the call's rows.

    Args:
        target: whose cache holds all rows of the call.
        length: tokens of the text before this round.
        proposal: what was verified.
        verdict: what the rule decided.
        defer: whether only the trunk's rows may stay.

    Returns:
        The tokens to append to the text; and the tokens that probably follow them, if a branch has told.
    """
    path = verdict.path
    tokens = (*(proposal.tokens[node] for node in path), verdict.next_token)
    on_trunk = next((depth for depth, node in enumerate(path) if node != depth), len(path))
    if defer or on_trunk == len(path):
        target.cache.rollback(length + on_trunk)
        # The token after the trunk is the target's own word on a trunk row.
        return tokens[: on_trunk + 1], tokens[on_trunk + 1 :]
    target.cache.keep(length, [length + node for node in path])
    return tokens, ()


def _origins(proposal: Proposal, verdict: Verdict, count: int) -> tuple[str, ...]:
    """Who proposed each of a round's ``count`` tokens."""
    evidence = proposal.evidence
    names = (str(UNKNOWN[0] if evidence is None else evidence[node][0]) for node in verdict.path[: count - 1])
    return (*names, "target")


def _logprobs(
    logits: LogitRows, verdict: Verdict, tokens: tuple[int, ...], count: int | None
) -> tuple[TokenLogprobs, ...] | None:
    if count is None:
        return None
    rows = (0, *(node + 1 for node in verdict.path))
    return tuple(log_probabilities(logits[row], token, count) for row, token in zip(rows, tokens, strict=False))
