"""The options that every way to generate takes, for type checkers; :meth:`Engine.stream` has the defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.logits_processors import LogitsProcessor


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``; :meth:`edge_spec.Engine.stream` explains them."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Iterable[int] | None
    banned_token_ids: Iterable[int]
    stop_token_ids: Iterable[int]
    logits_processors: Iterable[LogitsProcessor]
    grammar: Grammar | None
    logprobs: int | None
    deadline: float | None
    cancelled: Callable[[], bool] | None
    speculation: str
    verification: str | None
    max_draft: int | None
    tree: bool
