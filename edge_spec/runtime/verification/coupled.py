"""The coupled rule: the target's token is a function of law and noise, and a draft token is kept while it equals it."""

from __future__ import annotations

from collections.abc import Callable

from edge_spec.runtime.logit_rows import likeliest_of
from edge_spec.runtime.noise import sample_gumbel
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling import require_finite
from edge_spec.runtime.verification.rule import Chance, Laws, Verdict


def verify_coupled(p: Laws, proposal: Proposal, chance: Chance) -> Verdict:
    """Emit y_t = argmax(log p_t + Gumbel(seed, t)), the token that plain decoding would emit, at every position.

    The tokens are those of plain decoding, whatever is proposed; so ``proposal.q`` is not looked at. A drafter that
    takes argmax(log q_t + the same noise) is right with probability at least (1 - TV) / (1 + TV), where TV is the
    total variation between p_t and q_t (Daliri et al. 2025, "Coupling without communication and drafter-invariant
    speculative decoding").

    Args:
        p: the target's laws by row, which may know the token without all of law and noise (``token``); rows need not be
            normalized, and only those on the accepted path are read.
        proposal: a chain or a tree.
        chance: gives the Gumbel noise.
    """
    told: Callable[[int, int, Chance], int | None] | None = getattr(p, "token", None)

    def own_token(row: int, depth: int) -> int:
        if told is not None and (token := told(row, depth, chance)) is not None:
            return token
        law = p[row]
        return sample_gumbel(law, chance.gumbel(depth, len(law)))

    return _follow(proposal, own_token)


def verify_greedy(logits: Laws, proposal: Proposal) -> Verdict:
    """The coupled rule without noise, for temperature 0: keep draft tokens while each is the target's likeliest.

    Args:
        logits: the target's logits by row, float32; or laws; or rows that may know their likeliest token without being
            looked at (``likeliest``). Only rows on the accepted path are read.
        proposal: a chain or a tree.

    Raises:
        LogitsError: a row on that path has no finite maximum.
    """

    def own_token(row: int, depth: int) -> int:
        if (known := likeliest_of(logits, row)) is not None:
            return known
        law = logits[row]
        token = int(law.argmax())
        require_finite(law.item(token), row)  # argmax stops at a NaN, so looking there finds any
        return token

    return _follow(proposal, own_token)


def _follow(proposal: Proposal, own_token: Callable[[int, int], int]) -> Verdict:
    """Walk down the tree along the target's own tokens, given by row and depth."""
    if not proposal.tokens:
        return Verdict((), own_token(0, 0))
    children = proposal.children
    path: list[int] = []
    row = 0
    while True:
        token = own_token(row, len(path))
        child = next((node for node in children[row] if proposal.tokens[node] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        row = child + 1
