"""The block rule: a chain of draft tokens is verified as a whole, from its end."""

from __future__ import annotations

from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.verification.residual import acceptance_probability, drawn_probability, reject
from edge_spec.runtime.verification.rule import Chance, Laws, Verdict, require_chain


def verify_block(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
    """Keep the longest part of the block that is accepted; never fewer tokens, in expectation, than the token rule.

    Sun et al. 2024 ("Block verification accelerates speculative decoding", algorithm 2). With p_0 = 1 and
    p_i = min(1, p_(i-1) p(x_i) / q(x_i)), the first i tokens are accepted with probability
    h_i = Z_i / (Z_i + 1 - p_i), where Z_i = sum (p_i p - q)+ over the laws after x_i, and h_K = p_K. The longest
    accepted part counts, so the scan starts at the end and stops at the first success. Then the next token is drawn
    from (p_i p - q)+, or from the target if the whole block was kept.

    The law holds if each token was drawn from its q and if whether it was proposed at all does not depend on it.

    Args:
        p: the target's laws by row.
        proposal: a chain.
        chance: makes the decisions.

    Raises:
        ValueError: the proposal is a tree.
    """
    require_chain(proposal, "block")
    weights = [1.0]
    for node, token in enumerate(proposal.tokens):
        owed = weights[-1] * float(p[node][token])
        weights.append(acceptance_probability(owed, drawn_probability(proposal.law(node), token)))
    left, weight = p[len(proposal)], weights[-1]
    for length in range(len(proposal), 0, -1):
        if chance.keep(length - 1, weight):
            return Verdict(tuple(range(length)), chance.draw(left))
        row = length - 1
        left, weight = reject(p[row], proposal.law(row), proposal.tokens[row], weights[row])
    return Verdict((), chance.draw(left))
