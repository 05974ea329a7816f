"""A model that is a plain function from a text to logits, behind the interface of ``edge_spec.runtime.model.Model``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.loop import Round, decode, prefill
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.verification import RULES

LogitsOf = Callable[[Sequence[int]], np.ndarray]


class StubCache:
    """A cache that holds the tokens themselves. Like the real one, it only gets shorter by a smaller number."""

    def __init__(self) -> None:
        self.length = 0
        self.memory_bytes = 0
        self._slots: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return self._slots[: self.length]

    def append(self, tokens: Sequence[int]) -> None:
        self._slots[self.length :] = tokens
        self.length += len(tokens)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RequestError(f"Cannot roll the cache back to {length} tokens; it holds {self.length}.")
        self.length = length


class StubModel:
    """Computes a row from what the cache holds, so that a token left there or missing changes every later row."""

    def __init__(self, logits_of: LogitsOf, context: int = 1000) -> None:
        self.context = context
        self.cache = StubCache()
        self._logits_of = logits_of
        self._logits = np.zeros((0, 0), np.float32)

    def forward(self, token_ids: Sequence[int], logit_rows: Sequence[int]) -> np.ndarray:
        past = self.cache.length
        if not 0 < len(token_ids) <= self.context - past:
            raise RequestError(f"{len(token_ids)} tokens do not fit: the cache holds {past} of {self.context}.")
        self.cache.append(token_ids)
        self._logits.fill(np.nan)  # the last call's logits were valid until now
        text = self.cache.tokens
        if len(logit_rows):
            self._logits = np.stack([self._logits_of(text[: past + row + 1]) for row in logit_rows])
        return self._logits

    def prefill(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.forward(token_ids, ())


class StubDrafter:
    """Proposes what a function of the text and the budget says, as determined tokens."""

    name = "stub"
    default_budget = 4
    memory_bytes = 0

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._propose = propose

    def propose(self, context: Context, budget: int) -> Proposal:
        tokens = tuple(self._propose(context.tokens, budget))
        assert len(tokens) <= budget
        return Proposal(tokens)

    def observe(self, accepted: Sequence[int], logits: np.ndarray) -> None:
        assert len(accepted) == len(logits)

    def rollback(self, length: int) -> None:
        pass


class Pausing:
    """A drafter that proposes nothing, or less than it is asked for, whenever a function says so."""

    def __init__(self, drafter: Drafter, cap: Callable[[], int]) -> None:
        self.name, self.default_budget = drafter.name, drafter.default_budget
        self.rollback, self.observe = drafter.rollback, drafter.observe
        self._drafter = drafter
        self._cap = cap

    @property
    def memory_bytes(self) -> int:
        return self._drafter.memory_bytes

    def propose(self, context: Context, budget: int) -> Proposal:
        cap = min(budget, self._cap())
        return self._drafter.propose(context, cap) if cap > 0 else Proposal()


def context_of(prompt: Sequence[int], params: SamplingParams, rule: str = "coupled", processors: Any = ()) -> Context:
    """A request as the engine hands it to the loop."""
    return Context(list(prompt), params, LogitsPipeline(params, processors), RULES[rule].coupled)


def rounds_of(
    target: StubModel,
    drafter: Drafter | None,
    context: Context,
    max_length: int,
    max_draft: int = 4,
    rule: str = "coupled",
) -> Iterator[Round]:
    """The production loop on a stub."""
    model: Any = target
    prefill(model, context)
    return decode(model, drafter, context, RULES[rule], max_draft, max_length)
