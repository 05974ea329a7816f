"""What the target's law has left after a draft token was rejected."""

from __future__ import annotations

import numpy as np

from edge_spec.runtime.proposal import Law


def acceptance_probability(p_token: float, q_token: float) -> float:
    """min(1, p / q), the chance that a proposed token is kept.

    A token that is impossible for the target is never kept, not even where q is zero too.
    """
    if p_token >= q_token:
        return 1.0 if p_token > 0.0 else 0.0
    return p_token / q_token


def drawn_probability(q: Law | None, token: int) -> float:
    """The probability with which a token was proposed; ``None`` stands for the one-hot law of the token."""
    return 1.0 if q is None else float(q[token])


def residual(p: Law, q: Law | None, rejected: int, weight: float = 1.0) -> Law:
    """What the target's law has left where the draft's law did not reach: (weight p - q)+, not normalized.

    Args:
        p: [vocab], the target's law.
        q: [vocab], the draft's law; ``None`` stands for the one-hot law of ``rejected``.
        rejected: the token that was proposed and not kept.
        weight: the probability with which what precedes the token is kept, see :func:`reject`.

    Returns:
        [vocab], non-negative, a new array; may be all zero.
    """
    left: Law = p * weight if weight < 1.0 else p.copy()
    if q is None:
        left[rejected] = 0.0
        return left
    left -= q
    np.maximum(left, 0.0, out=left)
    return left


def reject(p: Law, q: Law | None, rejected: int, weight: float) -> tuple[Law, float]:
    """What becomes of a place in the text when a draft token there, and all that continued it, is rejected.

    A place is kept with probability ``weight``, and then followed by a token with law ``p``: it owes ``weight * p``.
    The draft token has paid min(weight p, q) of that. With r = (weight p - q)+ and Z = sum r, the rest r is owed by
    what happens after the rejection, whose probability is Z + 1 - weight. So the place is now kept with probability
    Z / (Z + 1 - weight), and followed by a token with law r / Z (Sun et al. 2024, "Block verification accelerates
    speculative decoding"; Weng et al. 2025, "Traversal verification for speculative tree decoding").

    Args:
        p: [vocab], the target's law.
        q: [vocab], the law the token was drawn from; ``None`` if it was determined.
        rejected: the token.
        weight: from 0 to 1.

    Returns:
        The law that is left, [vocab], not normalized but not all zero, and the weight.
    """
    left = residual(p, q, rejected, weight)
    total = float(left.sum(dtype=np.float64))
    if total > 0.0:
        return left, total / (total + (1.0 - weight))  # in this order: 1 + total may round to 1
    # Nothing is owed. Then the place is given up for certain; or, if it was certain to be kept, p and q agree to
    # rounding, the rejection was rounding too, and p is the answer.
    return p, 1.0 if weight == 1.0 else 0.0
