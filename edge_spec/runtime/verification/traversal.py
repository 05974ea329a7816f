"""The traversal rule: a tree of draft tokens is verified from its leaves."""

from __future__ import annotations

import numpy as np

from edge_spec.runtime.proposal import Law, Proposal
from edge_spec.runtime.verification.residual import acceptance_probability, drawn_probability, reject
from edge_spec.runtime.verification.rule import Chance, Laws, Verdict


def verify_traversal(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
    """Accept the first node, children before parents and elder siblings before younger, that chance lets pass.

    Weng et al. 2025 ("Traversal verification for speculative tree decoding"). A node comes with the probability
    ``weight`` of being kept and the law p of what follows. Each child x in turn gets min(1, weight p(x) / q(x)) and
    is visited. If nothing in its subtree is accepted, p becomes r / Z and the weight Z / (Z + 1 - weight), where
    r = (weight p - q)+ and Z = sum r; and unless siblings are drawn with replacement, q loses x. When no child is
    left, the node is accepted with its weight, and the next token is drawn from its p. The context has weight 1.
    On a chain this is the block rule, decision by decision.

    The law holds if each token was drawn from its q, in the order of siblings, and if whether it was proposed at all
    does not depend on it.

    Args:
        p: the target's laws by row.
        proposal: a chain or a tree.
        chance: makes the decisions.
    """
    children = proposal.children

    def visit(path: tuple[int, ...], weight: float) -> Verdict | None:
        row = path[-1] + 1 if path else 0
        law, q = p[row], proposal.law(row)
        for node in children[row]:
            if weight == 0.0:
                break
            token = proposal.tokens[node]
            owed = weight * float(law[token])
            verdict = visit((*path, node), acceptance_probability(owed, drawn_probability(q, token)))
            if verdict is not None:
                return verdict
            law, weight = reject(law, q, token, weight)
            if node != children[row][-1]:
                law = law / law.sum(dtype=np.float64).astype(law.dtype)
                q = q if proposal.replacement else _without(q, token)
        if not path or chance.keep(path[-1], weight):
            return Verdict(path, chance.draw(law))
        return None

    verdict = visit((), 1.0)
    assert verdict is not None  # the context is kept
    return verdict


def _without(q: Law | None, token: int) -> Law | None:
    """The law of the next sibling: what the token leaves of it; ``None``, determined, if nothing."""
    if q is None:
        return None
    left = q.copy()
    left[token] = 0.0
    total = left.sum(dtype=np.float64)
    return left / total.astype(q.dtype) if total > 0.0 else None
