"""Which tokens the logits of a draft model or a head propose, and what speaks for them."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.logit_rows import LogitRows, top_of
from edge_spec.runtime.noise import sample_gumbel
from edge_spec.runtime.proposal import Evidence, Proposal
from edge_spec.runtime.sampling import probabilities, require_finite

# How many of the draft's likeliest tokens a place in a tree gets.
_SIBLINGS = 3

# Where the probabilities that count as the same evidence are parted.
EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)

# Below, the likeliest token is all but certain, and no logit is to become infinite.
_LEAST_TEMPERATURE = 1e-4

# What to expect of its tokens before any was verified: of the likeliest, and of the second and third.
_RUNNERS_UP = ((1, 0.2), (2, 0.1))
PRIORS: dict[Evidence, float] = {
    evidence: expected
    for name in ("model", "head")
    for evidence, expected in (
        ((name,), 0.6),
        *(((name, kind, rank), expected) for kind in ("greedy", "coupled") for rank, expected in _RUNNERS_UP),
    )
}

Candidate = tuple[int, Evidence]


def usual_evidence(context: Context, name: str = "model") -> Evidence:
    """What speaks for a token of a drafter's network of which no more is known than how it will be chosen."""
    return (name, "greedy" if context.noise is None else "coupled" if context.coupled else "drawn", 0)


def drafts_at_once(context: Context) -> bool:
    """Whether what the model computes decides the token, so that it can choose on its own: see :func:`chain_noise`."""
    return not context.pipeline.active and (context.noise is None or context.coupled)


def chain_noise(
    context: Context, path: Sequence[int], steps: int, columns: int, vocabulary: DraftVocabulary
) -> tuple[list[NDArray[np.float32]] | None, float]:
    """What the graph needs to choose the ``steps`` tokens after ``path`` as :func:`choose` would.

    That is so for a greedy request and a plain temperature. It knows nothing of top-k, top-p and min-p, and now and
    then chooses a token that they exclude, which the target then rejects.

    Returns:
        The noise of each step, float32 [columns], ``None`` for a greedy request; and the inverse temperature.
    """
    if context.noise is None:
        return None, 1.0
    start = len(context.tokens) + len(path)
    noise = [vocabulary.noise(context.noise, start + step, columns) for step in range(steps)]
    return noise, 1.0 / max(context.sampling.temperature, _LEAST_TEMPERATURE)


def chain_candidates(context: Context, drafted: DraftedChain) -> list[Candidate]:
    """The tokens that a graph has chosen, with their evidence; none from where the model broke down."""
    kind = "greedy" if context.noise is None else "coupled"
    sound = list(takewhile(math.isfinite, drafted.shares))
    told = zip(drafted.tokens, sound, strict=False)
    return [(token, ("model", kind, 0, bisect(EDGES, share))) for token, share in told]


def evidence_of(agreement: Iterable[tuple[float, bool]], name: str = "model") -> Iterator[tuple[Evidence, bool]]:
    """What a calibration's comparison of draft and target says about greedy drafting.

    Args:
        agreement: the probability of the draft's likeliest token, and whether it was the target's.
        name: of the drafter.
    """
    return (((name, "greedy", 0, bisect(EDGES, share)), agreed) for share, agreed in agreement)


def known_columns(rows: LogitRows, vocabulary: DraftVocabulary) -> tuple[NDArray[np.float32], DraftVocabulary, float]:
    """What there is to choose from after a step of the draft.

    Where the likeliest tokens came from the device, they will do, for nothing that is proposed changes the text: no row
    of the draft is brought from there for the sake of what is left.

    Args:
        rows: one row of the draft's logits.
        vocabulary: what its columns stand for.

    Returns:
        Logits, float32 [n]; what they stand for; and the log-sum-exp of all that were left out.
    """
    top = top_of(rows, 0)
    if top is None:
        return rows[0], vocabulary, -np.inf
    known = float(np.exp(top.given.astype(np.float64) - top.log_sum_exp).sum())
    left_out = top.log_sum_exp + np.log1p(-known) if known < 1.0 else -np.inf
    return top.logits, vocabulary.only(top.ids, rows.shape[1]), float(left_out)


def choose(
    context: Context,
    path: Sequence[int],
    logits: NDArray[np.float32],
    branches: bool,
    vocabulary: DraftVocabulary = WHOLE,
    left_out: float = -np.inf,
    name: str = "model",
) -> tuple[Sequence[Candidate], NDArray[np.float32] | None]:
    """Choose the token after ``path``.

    Args:
        context: the text so far.
        path: tokens behind the text.
        logits: float32 [columns], the draft's own.
        branches: whether runners-up are wanted.
        vocabulary: what the columns stand for.
        left_out: log-sum-exp of the logits of all other columns.
        name: of the drafter, which evidence begins with.

    Returns:
        The token and its runners-up, with their evidence; and the law the token was drawn from, float32 [vocab],
        ``None`` if no rule will ask.
    """
    if context.pipeline.active:  # which speaks of the target's ids
        logits, vocabulary = vocabulary.spread(logits, -np.inf), WHOLE
    processed = context.pipeline.process_row(logits, context.history, path)
    count = _SIBLINGS if branches else 1
    if context.noise is None:
        columns = best_columns(processed, count)
        require_finite(processed[columns[0]], 0)
        peak = processed[columns[0]]
        total = float(np.exp(processed - peak).sum()) + float(np.exp(left_out - peak))
        shares = [float(np.exp(processed[column] - peak)) / total for column in columns]
        return _with_evidence(name, "greedy", map(vocabulary.id_of, columns), shares), None
    law = probabilities(processed[None], context.sampling)[0]
    start, node = len(context.tokens), len(path)
    if context.coupled:
        # A token's noise is that of its id, whichever column it has here.
        noise = vocabulary.noise(context.noise, start + node, len(law))
        if count == 1:
            columns = [sample_gumbel(law, noise)]
        else:
            with np.errstate(divide="ignore"):
                columns = best_columns(np.log(law) + noise, count)
        shares = [float(law[column]) for column in columns]
        return _with_evidence(name, "coupled", map(vocabulary.id_of, columns), shares), None
    # What is said of a drawn token must not depend on the draw, so it is said of the law.
    share = float(law.max())
    law = vocabulary.spread(law, 0.0)
    token = context.noise.round(start).draw_draft(node, law)
    return _with_evidence(name, "drawn", [token], [share]), law


def best_columns(scores: NDArray[np.float32], count: int) -> list[int]:
    """The ``count`` highest scores' indices, best first; those of -inf are left out, except the first."""
    best = [int(np.argmax(scores))]
    if count > 1:
        left = scores.copy()
        for _ in range(count - 1):
            left[best[-1]] = -np.inf
            token = int(np.argmax(left))
            if left[token] == -np.inf:
                break
            best.append(token)
    return best


def _with_evidence(name: str, kind: str, tokens: Iterable[int], shares: Sequence[float]) -> list[Candidate]:
    return [
        (token, (name, kind, rank, bisect(EDGES, share)))
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True))
    ]


def laid_out(
    chain: Sequence[int],
    evidence: Sequence[Evidence],
    siblings: Sequence[Sequence[Candidate]],
    laws: Sequence[NDArray[np.float32]],
    most: int,
) -> Proposal:
    """The chain first, then the runners-up of its places."""
    q = laws or None
    extra = [(depth - 1, *candidate) for depth, others in enumerate(siblings) for candidate in others]
    extra = extra[: most - len(chain)]
    if not extra:
        return Proposal(tuple(chain), q, evidence=tuple(evidence))
    return Proposal(
        (*chain, *(token for _, token, _ in extra)),
        q,
        (*range(-1, len(chain) - 1), *(parent for parent, _, _ in extra)),
        evidence=(*evidence, *(reason for _, _, reason in extra)),
    )
