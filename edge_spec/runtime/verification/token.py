"""The token rule: rejection sampling, one draft token after the other."""

from __future__ import annotations

from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.verification.residual import acceptance_probability, drawn_probability, reject
from edge_spec.runtime.verification.rule import Chance, Laws, Verdict, require_chain


def verify_token(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
    """Speculative sampling token by token: the emitted tokens follow the target's law exactly.

    Leviathan et al. 2023 ("Fast inference from transformers via speculative decoding", algorithm 1) and Chen et
    al. 2023: keep x ~ q with probability min(1, p(x) / q(x)); on the first rejection draw from (p - q)+ instead;
    if all are kept, draw one more token from the target.

    The law holds if each token was drawn from its q and if whether it was proposed at all does not depend on it.

    Args:
        p: the target's laws by row; rows after the first rejection are not read.
        proposal: a chain.
        chance: makes the decisions.

    Raises:
        ValueError: the proposal is a tree.
    """
    require_chain(proposal, "token")
    for node, token in enumerate(proposal.tokens):
        law, q = p[node], proposal.law(node)
        if not chance.keep(node, acceptance_probability(float(law[token]), drawn_probability(q, token))):
            left, _ = reject(law, q, token, 1.0)
            return Verdict(tuple(range(node)), chance.draw(left))
    return Verdict(tuple(range(len(proposal))), chance.draw(p[len(proposal)]))
