"""The round of speculative decoding: propose, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.model import PREFILL_ROWS, Model
from edge_spec.runtime.noise import Noise
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.verification import RULES, Verdict, verify_greedy


@dataclass(frozen=True)
class Round:
    """What one target call brought.

    Attributes:
        tokens: the accepted draft tokens, then the target's own.
        drafted: number of tokens proposed.
        drafter: who proposed them; ``None`` if nothing was.
        draft_seconds, verify_seconds, total_seconds: time spent proposing, in the target's call, and in all.
    """

    tokens: tuple[int, ...]
    drafted: int
    drafter: str | None
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
    target: Model, drafter: Drafter | None, context: Context, max_draft: int, max_length: int
) -> Iterator[Round]:
    """Run rounds until the text is ``max_length`` tokens long.

    Before every round the target's cache holds all of ``context.tokens`` but a pending end: after the first round
    just the last token. The first round drafts nothing: it carries the prompt's end, and somebody waits for the first
    token, while a drafter would have to read the whole prompt before it could propose.

    Args:
        target: the model whose text it is.
        drafter: proposes; ``None`` decodes plainly.
        context: the text so far; rounds append to it.
        max_draft: most tokens to propose in a round.
        max_length: tokens of prompt and output together; at most the target's context.
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

        verdict = _verify(logits, proposal, context)
        tokens = (*proposal.tokens[: verdict.accepted], verdict.next_token)
        target.cache.rollback(length + verdict.accepted)
        context.tokens.extend(tokens)
        if drafter is not None:
            drafter.rollback(length + verdict.accepted)
            drafter.observe(tokens, logits[: len(tokens)])
        yield Round(
            tokens=tokens,
            drafted=len(proposal),
            drafter=drafter.name if drafter is not None and len(proposal) else None,
            draft_seconds=proposed - started,
            verify_seconds=answered - proposed,
            total_seconds=perf_counter() - started,
        )


def _propose(drafter: Drafter | None, context: Context, budget: int) -> Proposal:
    return Proposal() if drafter is None or budget <= 0 else drafter.propose(context, budget)


def _verify(logits: NDArray[np.float32], proposal: Proposal, context: Context) -> Verdict:
    """Apply the request's rule to the rows of one target call: greedy at temperature 0, else token rejection."""
    sampling = context.sampling
    if sampling.greedy:
        return verify_greedy(logits, proposal)
    assert sampling.seed is not None  # the context's parameters are seeded
    noise = Noise(sampling.seed).round(len(context.tokens))
    return RULES["token"].verify(probabilities(logits, sampling), proposal, noise)
