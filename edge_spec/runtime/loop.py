"""The round of speculative decoding: propose, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.history import chain_paths
from edge_spec.runtime.logits_processors import ProcessedRows
from edge_spec.runtime.logprobs import TokenLogprobs, log_probabilities
from edge_spec.runtime.model import PREFILL_ROWS, Model
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.target_laws import TargetLaws
from edge_spec.runtime.verification import Laws, Rule, Verdict, verify_greedy


@dataclass(frozen=True)
class Round:
    """What one target call brought.

    Attributes:
        tokens: the accepted draft tokens, then the target's own.
        drafted: number of tokens proposed.
        drafter: who proposed them; ``None`` if nothing was.
        logprobs: the target's log-probabilities at each of the tokens; ``None`` if they were not asked for.
        draft_seconds, verify_seconds, total_seconds: time spent proposing, in the target's call, and in all.
    """

    tokens: tuple[int, ...]
    drafted: int
    drafter: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    draft_seconds: float
    verify_seconds: float
    total_seconds: float

    @property
    def accepted(self) -> int:
        """Number of draft tokens kept."""
        return len(self.tokens) - 1


def prefill(target: Model, context: Context) -> None:
    """Bring the prompt into the target's cache, but for a last chunk that travels with the first round."""
    unseen = context.tokens[target.cache.length :]
    whole_chunks = (len(unseen) - 1) // PREFILL_ROWS
    target.prefill(unseen[: whole_chunks * PREFILL_ROWS])


def decode(
    target: Model, drafter: Drafter | None, context: Context, rule: Rule, max_draft: int, max_length: int
) -> Iterator[Round]:
    """Run rounds until the text is ``max_length`` tokens long.

    Before every round the target's cache holds all of ``context.tokens`` but a pending end: after the first round
    just the last token. The first round drafts nothing: it carries the prompt's end, and somebody waits for the first
    token, while a drafter would have to read the whole prompt before it could propose.

    Args:
        target: the model whose text it is.
        drafter: proposes; ``None`` decodes plainly.
        context: the text so far; rounds append to it.
        rule: decides which draft tokens are kept.
        max_draft: most tokens to propose in a round.
        max_length: tokens of prompt and output together; at most the target's context.

    Raises:
        LogitsError: the target's logits, or what the request makes of them, leave no token to choose.
    """
    prompt_length = len(context.tokens)
    while len(context.tokens) < max_length:
        started = perf_counter()
        length = len(context.tokens)
        budget = 0 if length == prompt_length else min(max_draft, max_length - length - 1)
        proposal = _propose(drafter, context, budget)
        proposed = perf_counter()

        pending = context.tokens[target.cache.length :]
        rows = range(len(pending) - 1, len(pending) + len(proposal))
        logits = target.forward([*pending, *proposal.tokens], rows)
        answered = perf_counter()

        verdict = _verify(logits, proposal, context, rule)
        tokens = (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)
        logprobs = _logprobs(logits, tokens, context.sampling.logprobs)
        target.cache.rollback(length + verdict.accepted)
        context.tokens.extend(tokens)
        if drafter is not None:
            drafter.rollback(length + verdict.accepted)
            drafter.observe(tokens, logits[: len(tokens)])
        yield Round(
            tokens=tokens,
            drafted=len(proposal),
            drafter=drafter.name if drafter is not None and len(proposal) else None,
            logprobs=logprobs,
            draft_seconds=proposed - started,
            verify_seconds=answered - proposed,
            total_seconds=perf_counter() - started,
        )


def _propose(drafter: Drafter | None, context: Context, budget: int) -> Proposal:
    return Proposal() if drafter is None or budget <= 0 else drafter.propose(context, budget)


def _verify(logits: NDArray[np.float32], proposal: Proposal, context: Context, rule: Rule) -> Verdict:
    """Apply the rule to the rows of one target call, each row on its own path's history."""
    rows: Laws = logits
    if context.pipeline.active:
        rows = ProcessedRows(context.pipeline, logits, context.history, chain_paths(proposal.tokens))
    start = len(context.tokens)
    try:
        if context.noise is None:
            return verify_greedy(rows, proposal)
        return rule.verify(TargetLaws(rows, context.sampling), proposal, context.noise.round(start))
    except LogitsError as error:
        if error.row == 0:
            raise error.at(start) from None
        # A row behind draft tokens, which plain decoding might never have met: decide without it.
        kept = error.row - 1
        shorter = Proposal(proposal.tokens[:kept], None if proposal.q is None else proposal.q[:kept])
        return _verify(logits[: error.row], shorter, context, rule)


def _logprobs(
    logits: NDArray[np.float32], tokens: tuple[int, ...], count: int | None
) -> tuple[TokenLogprobs, ...] | None:
    if count is None:
        return None
    return tuple(log_probabilities(row, token, count) for row, token in zip(logits, tokens, strict=False))
