"""What logits for several places of a text at once propose, none of which knows what stands in the places before it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.candidate_tree import lay_out, trunk_first
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.model_choice import EDGES, best_columns
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.proposal import Evidence, Proposal
from edge_spec.runtime.sampling import probabilities, require_finite

# Tokens of a place that a tree may branch into, and the first of them that count alike.
_WIDTH = 6
_EVEN_RANK = 3


@dataclass(frozen=True)
class _Candidate:
    """A token of a place, its estimated probability given that all before it are right, and what speaks for it."""

    token: int
    chance: float
    evidence: Evidence


def parallel_evidence(context: Context) -> Evidence:
    """What speaks for a token of which no more is known than how it will be chosen."""
    return ("head", _kind(context), 0)


def propose_places(
    context: Context,
    prefix: Sequence[int],
    logits: NDArray[np.float32],
    budget: Budget,
    vocabulary: DraftVocabulary = WHOLE,
) -> Proposal:
    """Propose tokens for the places behind ``prefix``.

    Tokens that are not drawn are for the target to judge, so as many are told as the budget allows: with branches a
    tree, grown by the product of the probabilities, without the chain of the likeliest. Where a rule wants to know
    laws, each place's token is drawn from that of its place, which is a proper one whatever stands before it.

    Args:
        context: the text so far.
        prefix: tokens that are proposed already.
        logits: float32 [places, columns] from the first place of the text on: the first rows, as many as there are
            tokens in the prefix, are not asked.
        budget: how much may be proposed. Before each drawn token it is asked whether another is worth verifying.
        vocabulary: what the columns stand for.
    """
    drawn = _kind(context) == "drawn"
    tokens: list[int] = []
    laws: list[NDArray[np.float32]] = []
    evidence: list[Evidence] = []
    places: list[list[_Candidate]] = []
    for place in range(len(prefix), min(len(logits), len(prefix) + budget.tokens)):
        path = [*prefix, *tokens]
        try:
            if drawn:
                candidate, law = _draw(context, path, logits[place], vocabulary, place)
                if not budget.worth([*evidence, candidate.evidence]):
                    break
                laws.append(law)
                candidates = [candidate]
            else:
                # What the request makes of logits may depend on the path; off the trunk that is a guess.
                count = min(_WIDTH, budget.tokens) if budget.branches else 1
                candidates = _candidates(context, path, logits[place], vocabulary, place, count)
        except LogitsError:
            break
        tokens.append(candidates[0].token)
        evidence.append(candidates[0].evidence)
        places.append(candidates)
    if not budget.branches or drawn:
        return Proposal(tuple(tokens), laws or None, evidence=tuple(evidence))
    return _grow(places, budget.tokens)


def _kind(context: Context) -> str:
    return "greedy" if context.noise is None else "coupled" if context.coupled else "drawn"


def _candidates(
    context: Context,
    path: Sequence[int],
    logits: NDArray[np.float32],
    vocabulary: DraftVocabulary,
    place: int,
    count: int,
) -> list[_Candidate]:
    """The likeliest tokens after ``path``, with the noise of their position where the target has it too."""
    scores, vocabulary = _processed(context, path, logits, vocabulary)
    if context.noise is not None:
        with np.errstate(divide="ignore"):
            scores = np.log(probabilities(scores[None], context.sampling)[0])
        scores += vocabulary.noise(context.noise, len(context.tokens) + len(path), len(scores))
    best = best_columns(scores, count)
    peak = scores[best[0]]
    require_finite(peak, 0)
    # The target's laws are like these but for some error, so its choice is spread over what has the highest scores.
    total = float(np.exp(scores - peak).sum())
    shares = [float(np.exp(scores[column] - peak)) / total for column in best]
    return [
        _Candidate(vocabulary.id_of(column), share, _evidence(context, rank, share, place))
        for rank, (column, share) in enumerate(zip(best, shares, strict=True))
    ]


def _draw(
    context: Context, path: Sequence[int], logits: NDArray[np.float32], vocabulary: DraftVocabulary, place: int
) -> tuple[_Candidate, NDArray[np.float32]]:
    """A token drawn from the law of its place, and the law, float32 [vocab]."""
    assert context.noise is not None  # nobody draws for a greedy request
    scores, vocabulary = _processed(context, path, logits, vocabulary)
    law = probabilities(scores[None], context.sampling)[0]
    share = float(law.max())  # of the law, since what is said of a drawn token must not depend on the draw
    law = vocabulary.spread(law, 0.0)
    token = context.noise.round(len(context.tokens)).draw_draft(len(path), law)
    return _Candidate(token, share, _evidence(context, 0, share, place)), law


def _processed(
    context: Context, path: Sequence[int], logits: NDArray[np.float32], vocabulary: DraftVocabulary
) -> tuple[NDArray[np.float32], DraftVocabulary]:
    """What the request makes of the logits, and what their columns then stand for."""
    if context.pipeline.active:  # which speaks of the target's ids
        logits, vocabulary = vocabulary.spread(logits, -np.inf), WHOLE
    return context.pipeline.process_row(logits, context.history, path), vocabulary


def _evidence(context: Context, rank: int, share: float, place: int) -> Evidence:
    return ("head", _kind(context), min(rank, _EVEN_RANK), bisect(EDGES, share), place)


def _grow(places: Sequence[Sequence[_Candidate]], most: int) -> Proposal:
    """The tree of the likeliest paths: every node can go on with any candidate of the next place."""
    tokens: list[int] = []
    parents: list[int] = []
    evidence: list[Evidence] = []
    reach: list[float] = []
    # (-probability, a number that settles ties, the parent's probability, parent, place, rank)
    queue: list[tuple[float, int, float, int, int, int]] = []
    pushed = 0

    def push(before: float, parent: int, place: int, rank: int) -> None:
        nonlocal pushed
        if place < len(places) and rank < len(places[place]):
            pushed += 1
            heappush(queue, (-before * places[place][rank].chance, pushed, before, parent, place, rank))

    push(1.0, -1, 0, 0)
    while queue and len(tokens) < most:
        negative, _, before, parent, place, rank = heappop(queue)
        candidate = places[place][rank]
        tokens.append(candidate.token)
        parents.append(parent)
        evidence.append(candidate.evidence)
        reach.append((reach[parent] if parent >= 0 else 0.0) - negative)
        push(before, parent, place, rank + 1)
        push(-negative, len(tokens) - 1, place + 1, 0)
    return lay_out(trunk_first(range(len(tokens)), parents, reach), tokens, parents, evidence)
