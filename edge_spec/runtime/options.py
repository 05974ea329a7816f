"""The options that every way to generate takes, for type checkers; :meth:`Engine.stream` has the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``; :meth:`edge_spec.Engine.stream` explains them."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    speculation: str
    max_draft: int | None
