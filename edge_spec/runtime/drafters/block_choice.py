"""Which tokens the logits of a block propose where each place also looks at the token before it."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.model_choice import EDGES, Candidate, choose, laid_out
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.markov_bias import MarkovBias
from edge_spec.runtime.proposal import Evidence, Proposal


def propose_block(
    context: Context,
    prefix: Sequence[int],
    logits: NDArray[np.float32],
    scores: NDArray[np.float32] | None,
    markov: MarkovBias | None,
    budget: Budget,
) -> Proposal:
    """Propose a chain behind ``prefix``, one token after the other, with runners-up where branches are wanted.

    What is said of a place, its law and its confidence, depends on the tokens before it and never on its own or a
    later one. So a chain that is drawn ends before the first token that is not worth verifying, whatever might come
    behind it: to look further would let the draws decide whether they count, and bias the text.

    Args:
        context: the text so far.
        prefix: tokens that are proposed already.
        logits: float32 [places, columns], from the first place behind the text on.
        scores: float32 [places], of confidence, before the token before has its say; ``None`` without.
        markov: what the token before says; ``None`` without.
        budget: how much may be proposed.
    """
    chain: list[int] = []
    evidence: list[Evidence] = []
    siblings: list[Sequence[Candidate]] = []
    laws: list[NDArray[np.float32]] = []
    before = prefix[-1] if prefix else context.tokens[-1]
    for place in range(len(prefix), min(len(logits), len(prefix) + budget.tokens)):
        row, vocabulary = logits[place], WHOLE
        if markov is not None:
            columns, row = markov.biased(row, before)
            vocabulary = DraftVocabulary(columns, logits.shape[1])
        confidence = None if scores is None else _probability(float(scores[place]), markov, before)
        try:
            candidates, law = choose(context, [*prefix, *chain], row, budget.branches, vocabulary, name="head")
        except LogitsError:
            break
        candidates = [(token, _of_head(reason, confidence)) for token, reason in candidates]
        token, reason = candidates[0]
        if law is not None:
            if not budget.worth([*evidence, reason]):
                break
            laws.append(law)
        chain.append(token)
        evidence.append(reason)
        siblings.append(candidates[1:])
        before = token
    return laid_out(chain, evidence, siblings, laws, budget.tokens)


def _probability(score: float, markov: MarkovBias | None, before: int) -> float:
    """The head's own probability that a place's token is accepted if those before it are."""
    score += 0.0 if markov is None else markov.confidence(before)
    return 0.5 * (1.0 + math.tanh(0.5 * score))


def _of_head(reason: Evidence, confidence: float | None) -> Evidence:
    """What speaks for a token, by the head's confidence in its place, or else by its probability."""
    *broad, rank, _ = reason
    return reason if confidence is None or rank else (*broad, rank, bisect(EDGES, confidence))
