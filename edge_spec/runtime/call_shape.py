"""The shape of a session call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallShape:
    """The shape of a call.

    Attributes:
        rows: tokens, padding included.
        logit_rows: rows whose logits are computed, padding included.
        total: length of cache and rows together that attention is told; ``None`` for the true one.
    """

    rows: int
    logit_rows: int
    total: int | None = None
