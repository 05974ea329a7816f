"""Which draft tokens the target keeps, and what it says itself: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.sampling import Stream, greedy_tokens, sample

Law = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one target call.

    Attributes:
        accepted: how many of the proposed tokens are kept, from the first.
        next_token: the target's own token after them: the replacement of the first rejected one, or the bonus.
    """

    accepted: int
    next_token: int


def verify_greedy(logits: NDArray[np.float32], proposed: Sequence[int]) -> Verdict:
    """Keep draft tokens while each is the target's likeliest.

    Args:
        logits: float32 [K + 1, vocab]; row i follows the first i proposed tokens.
        proposed: K token ids.

    Raises:
        EdgeSpecError: a row has no finite maximum.
    """
    own = greedy_tokens(logits)
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == own[accepted]:
        accepted += 1
    return Verdict(accepted, int(own[accepted]))


def verify_token(p: Law, q: Law | None, proposed: Sequence[int], uniform: Callable[[int, int], float]) -> Verdict:
    """Speculative sampling token by token: the emitted tokens follow the target's law exactly.

    Leviathan et al. 2023 ("Fast inference from transformers via speculative decoding", algorithm 1) and Chen et
    al. 2023: keep x ~ q with probability min(1, p(x) / q(x)); on the first rejection draw from (p - q)+ instead;
    if all are kept, draw one more token from the target.

    The law holds if proposed[i] was drawn from q[i] and if whether it was proposed at all does not depend on it.

    Args:
        p: [K + 1, vocab], the target's laws; row i follows the first i proposed tokens.
        q: [K, vocab], the laws the tokens were drawn from; ``None`` if they were not drawn but determined.
        proposed: K token ids.
        uniform: noise in [0, 1) for a row and a :class:`Stream`. Called at most once for each pair.
    """
    for row, token in enumerate(proposed):
        drawn_from = None if q is None else q[row]
        q_token = 1.0 if drawn_from is None else float(drawn_from[token])
        if uniform(row, Stream.ACCEPT) >= acceptance_probability(float(p[row, token]), q_token):
            replacement = sample(residual(p[row], drawn_from, token), uniform(row, Stream.TOKEN))
            return Verdict(row, replacement)
    bonus = len(proposed)
    return Verdict(bonus, sample(p[bonus], uniform(bonus, Stream.TOKEN)))


def acceptance_probability(p_token: float, q_token: float) -> float:
    """min(1, p / q), the chance that a proposed token is kept.

    A token that is impossible for the target is never kept, not even where q is zero too.
    """
    if p_token >= q_token:
        return 1.0 if p_token > 0.0 else 0.0
    return p_token / q_token


def residual(p: Law, q: Law | None, rejected: int) -> Law:
    """What the target's law has left where the draft's law did not reach: (p - q)+, not normalized.

    Args:
        p: [vocab], the target's law.
        q: [vocab], the draft's law; ``None`` stands for the one-hot law of ``rejected``.
        rejected: the token that was proposed and not kept.

    Returns:
        [vocab], non-negative, not all zero.
    """
    if q is None:
        left = p.copy()
        left[rejected] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    # Nothing is left only if p and q agree to rounding. Then rejection itself was rounding, and p is the answer.
    return left if left.any() else p
