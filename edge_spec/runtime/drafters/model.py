"""Drafting with a small language model that shares the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Proposal
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling import Stream, greedy_tokens, probabilities, sample, uniform


class ModelDrafter:
    """Lets the draft model continue the text, one token after the other, with a cache of its own."""

    name = "model"
    default_budget = 4

    def __init__(self, model: Model) -> None:
        """Draft with ``model``, whose cache now belongs to this drafter."""
        self._model = model

    @property
    def memory_bytes(self) -> int:
        """Bytes of the draft's KV cache."""
        return self._model.cache.memory_bytes

    def propose(self, context: Context, budget: int) -> Proposal:
        """Sample a chain of ``budget`` tokens from the draft model, by the request's own sampling parameters."""
        budget = min(budget, self._model.context - len(context.tokens))
        if budget <= 0:
            return Proposal()
        sampling, start = context.sampling, len(context.tokens)
        pending: Sequence[int] = self._catch_up(context.tokens)
        tokens: list[int] = []
        laws: list[NDArray[np.float32]] = []
        while len(tokens) < budget:
            logits = self._model.forward(pending, (len(pending) - 1,))
            if not np.isfinite(logits.max()):  # a draft that breaks down costs speed, never the text
                break
            if sampling.greedy:
                token = int(greedy_tokens(logits)[0])
            else:
                assert sampling.seed is not None  # the context's parameters are seeded
                law = probabilities(logits, sampling)
                token = sample(law[0], uniform(sampling.seed, start + len(tokens), Stream.DRAFT))
                laws.append(law)
            tokens.append(token)
            pending = (token,)
        return Proposal(tuple(tokens), np.concatenate(laws) if laws else None)

    def observe(self, accepted: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Drop cached tokens from ``length`` on."""
        self._model.cache.rollback(min(length, self._model.cache.length))

    def _catch_up(self, tokens: Sequence[int]) -> Sequence[int]:
        """Prefill all but a last narrow step, and return the tokens of that step."""
        unseen = tokens[self._model.cache.length :]
        self._model.prefill(unseen[:-2])
        return unseen[-2:]
