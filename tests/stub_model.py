"""A model that is a plain function from a text to logits, behind the interface of ``edge_spec.runtime.model.Model``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.loop import Round, decode, prefill
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import FixedDraft
from edge_spec.runtime.verification import RULES

LogitsOf = Callable[[Sequence[int]], np.ndarray]


class StubCache:
    """A cache that holds the tokens themselves. Like the real one, it only gets shorter by a smaller number."""

    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self._slots: list[tuple[int, int]] = []  # tokens and their positions

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self._slots[: self.length]]

    @property
    def positions(self) -> list[int]:
        return [position for _, position in self._slots[: self.length]]

    @property
    def memory_bytes(self) -> int:
        return self.capacity

    def append(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        self._slots[self.length :] = zip(tokens, positions, strict=True)
        self.length += len(tokens)
        self.capacity = max(self.capacity, self.length)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RequestError(f"Cannot roll the cache back to {length} tokens; it holds {self.length}.")
        self.length = length

    def keep(self, length: int, slots: Sequence[int]) -> None:
        assert list(slots) == sorted(set(slots)) and all(length <= slot < self.length for slot in slots)
        self._slots[length:] = [self._slots[slot] for slot in slots]
        self.length = length + len(slots)


class StubModel:
    """Computes a row from what the cache holds, so that a token left there or missing changes every later row."""

    def __init__(
        self,
        logits_of: LogitsOf,
        context: int = 1000,
        positions: int = 1000,
        slides: bool = True,
        chains: tuple[int, ...] = (),
    ) -> None:
        self.context = context
        self.chain_lengths = chains
        self.columns = len(logits_of([0]))
        self.positions = positions
        self.slides = slides
        self.cache = StubCache()
        self._logits_of = logits_of
        self._logits = np.zeros((0, 0), np.float32)

    def forward(
        self,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        positions: Sequence[int] | None = None,
        mask: np.ndarray | None = None,
    ) -> np.ndarray:
        past = self.cache.length
        if not 0 < len(token_ids) <= self.context - past:
            raise RequestError(f"{len(token_ids)} tokens do not fit: the cache holds {past} of {self.context}.")
        if mask is not None:
            assert positions is not None
            assert list(positions) == [past + int(seen.sum()) - 1 for seen in mask]
        assert positions is None or (past > 0 and self.slides)
        where = list(range(past, past + len(token_ids)) if positions is None else positions)
        assert max(where) < self.positions
        mask = np.tri(len(token_ids), dtype=bool) if mask is None else mask
        before = self.cache.tokens
        self.cache.append(token_ids, where)
        self._logits.fill(np.nan)  # the last call's logits were valid until now
        if len(logit_rows):
            seen = [[*before, *np.array(token_ids)[mask[row]].tolist()] for row in logit_rows]
            self._logits = np.stack([self._logits_of(text) for text in seen])
        return self._logits

    def draft(
        self,
        token_ids: Sequence[int],
        steps: int,
        noise: Sequence[np.ndarray] | None = None,
        inverse_temperature: float = 1.0,
    ) -> DraftedChain:
        assert steps in self.chain_lengths
        assert self.cache.positions == list(range(self.cache.length))
        tokens: list[int] = []
        shares: list[float] = []
        for step in range(steps):
            read = tokens[-1:] or token_ids
            logits = self.forward(read, (len(read) - 1,))[0] * inverse_temperature
            tokens.append(int(np.argmax(logits if noise is None else logits + noise[step])))
            weights = np.exp(logits - logits.max())
            shares.append(float(weights[tokens[-1]] / weights.sum()))
        return DraftedChain(tuple(tokens), tuple(shares))

    def new_cache(self) -> StubCache:
        return StubCache()

    def use(self, cache: StubCache) -> None:
        self.cache = cache

    def shrink(self, cache: StubCache, slots: int = 0) -> None:
        cache.length = min(cache.length, slots)
        cache.capacity = min(cache.capacity, slots)

    def prefill(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.forward(token_ids, ())


class StubDrafter:
    """Proposes what a function of the text and the budget says: a chain of determined tokens, or a proposal."""

    name = "stub"
    memory_bytes = 0

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int] | Proposal]) -> None:
        self._propose = propose

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        proposed = self._propose([*context.tokens, *prefix], budget.tokens)
        proposal = proposed if isinstance(proposed, Proposal) else Proposal(tuple(proposed))
        assert len(proposal) <= budget.tokens
        return proposal

    def observe(self, outcome: Outcome) -> None:
        assert len(outcome.logits) == len(outcome.proposal) + 1

    def rollback(self, length: int) -> None:
        pass


class Pausing:
    """A drafter that proposes nothing, or less than it is asked for, whenever a function says so."""

    def __init__(self, drafter: Drafter, cap: Callable[[], int]) -> None:
        self.name = drafter.name
        self.rollback, self.observe = drafter.rollback, drafter.observe
        self._drafter = drafter
        self._cap = cap

    @property
    def memory_bytes(self) -> int:
        return self._drafter.memory_bytes

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        cap = min(budget.tokens, self._cap())
        return self._drafter.propose(context, Budget(cap, budget.branches), prefix) if cap > 0 else Proposal()


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
    branches: bool = False,
    defer: bool = True,
) -> Iterator[Round]:
    """The production loop on a stub."""
    model: Any = target
    prefill(model, context)
    speculation = None if drafter is None else FixedDraft(drafter, max_draft, branches)
    return decode(model, speculation, context, RULES[rule], max_length, defer)
