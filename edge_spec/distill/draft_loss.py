"""How far a draft's distribution is from the target's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def draft_losses(logits: Tensor, columns: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and the share of drafted tokens that would be accepted.

    Both are taken over the target's likeliest tokens, as far as the draft vocabulary has them, at their probabilities
    over the full vocabulary. So a row whose likeliest tokens the draft cannot propose counts as little as it can win.

    Args:
        logits: float32 or bfloat16 [rows, draft vocabulary], the draft's.
        columns: int64 [rows, k], columns of the target's likeliest tokens.
        probabilities: float32 [rows, k], the target's; 0 where there is no column.

    Returns:
        Cross-entropy, and the sum of min(p, q), that is one minus the total variation: each float32 [rows].
    """
    losses: tuple[Tensor, Tensor] = _DraftLosses.apply(logits, columns, probabilities)  # type: ignore[no-untyped-call]
    return losses


class _DraftLosses(torch.autograd.Function):
    """Passes over the logits take as long as matrix products do on a small machine; there are two, not ten."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        softmax = logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
        q = softmax.gather(1, columns)
        ctx.softmax, ctx.columns, ctx.probabilities, ctx.q = softmax, columns, probabilities, q
        ctx.dtype = logits.dtype
        log_q = q.clamp(min=torch.finfo(q.dtype).tiny).log()
        return -(probabilities * log_q).sum(1), torch.minimum(probabilities, q).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        of_cross_entropy, of_overlap = (gradient[:, None] for gradient in gradients)
        # By log q of each token; those of the logits follow from log q = logit - logsumexp(logits).
        by_log_q = of_overlap * torch.where(ctx.q < ctx.probabilities, ctx.q, 0.0)
        by_log_q -= of_cross_entropy * ctx.probabilities
        by_logit = ctx.softmax.mul_(-by_log_q.sum(1, keepdim=True))
        ctx.softmax = None
        return by_logit.scatter_add_(1, ctx.columns, by_log_q).to(ctx.dtype), None, None
