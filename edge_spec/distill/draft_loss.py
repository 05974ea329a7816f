"""How far a head's distribution is from the target's."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_losses(logits: Tensor, columns: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and the share of drafted tokens that would be accepted.

    Both are taken over the target's likeliest tokens, as far as the draft vocabulary has them, at their probabilities
    over the full vocabulary. So a row whose likeliest tokens the head cannot propose counts as little as it can win.

    Args:
        logits: float32 [rows, draft vocabulary], the head's.
        columns: int64 [rows, k], columns of the target's likeliest tokens.
        probabilities: float32 [rows, k], the target's; 0 where there is no column.

    Returns:
        Cross-entropy, and the sum of min(p, q), that is one minus the total variation: each float32 [rows].
    """
    log_q = logits.gather(1, columns) - logits.logsumexp(1, keepdim=True)
    return -(probabilities * log_q).sum(1), torch.minimum(probabilities, log_q.exp()).sum(1)
