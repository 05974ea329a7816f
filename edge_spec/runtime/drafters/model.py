"""Drafting with a small language model that shares the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Proposal
from edge_spec.runtime.model import Model
from edge_spec.runtime.noise import sample_gumbel
from edge_spec.runtime.sampling import greedy_tokens, probabilities


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
        """Sample a chain of ``budget`` tokens from the draft model, by the request's own sampling parameters.

        A draft that breaks down (NaN, or no token left) ends its proposal there: it costs speed, never the text.
        """
        budget = min(budget, self._model.context - len(context.tokens))
        if budget <= 0:
            return Proposal()
        pending: Sequence[int] = self._catch_up(context.tokens)
        tokens: list[int] = []
        laws: list[NDArray[np.float32]] = []
        while len(tokens) < budget:
            logits = self._model.forward(pending, (len(pending) - 1,))[0]
            try:
                token, law = _choose(context, tokens, logits)
            except LogitsError:
                break
            tokens.append(token)
            if law is not None:
                laws.append(law)
            pending = (token,)
        return Proposal(tuple(tokens), np.stack(laws) if laws else None)

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


def _choose(
    context: Context, drafted: Sequence[int], logits: NDArray[np.float32]
) -> tuple[int, NDArray[np.float32] | None]:
    """Choose the token after ``drafted`` and say from which law it was drawn; ``None`` if no rule will ask.

    Args:
        context: the text so far.
        drafted: tokens of this proposal.
        logits: float32 [vocab], the draft's own.
    """
    processed = context.pipeline.process_row(logits, context.history, drafted)
    if context.noise is None:
        return int(greedy_tokens(processed[None])[0]), None
    law = probabilities(processed[None], context.sampling)[0]
    start, node = len(context.tokens), len(drafted)
    if context.coupled:
        return sample_gumbel(law, context.noise.gumbel(start + node, len(law))), None
    return context.noise.round(start).draw_draft(node, law), law
