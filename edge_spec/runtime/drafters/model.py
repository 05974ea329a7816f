"""Drafting with a small language model that shares the target's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.chain import ChainDrafter
from edge_spec.runtime.drafters.model_choice import Candidate, chain_candidates, chain_noise, drafts_at_once
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_text import ReadText
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence


class ModelDrafter(ChainDrafter[Model, ReadText]):
    """Lets the draft model continue the text, one token after the other, with a cache of its own."""

    name = "model"

    def __init__(
        self,
        model: Model,
        window: int | None = None,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        load: Callable[[], Model] | None = None,
        vocabulary: DraftVocabulary = WHOLE,
        chain_step: float = 1.0,
    ) -> None:
        """Draft with a model.

        Args:
            model: the draft, which now belongs to this drafter, with its cache.
            window: most tokens in the cache; ``None`` for all of the model's context.
            on_call: told rows, cached tokens and seconds of every call of the model, and the tokens that it drafted if
                there were several.
            clock: tells the time, in seconds.
            load: loads the model again, once it was given up.
            vocabulary: what the columns of its logits stand for.
            chain_step: what a token costs that is drafted with others in one call, in steps of their own calls.

        Raises:
            RequestError: the window is too small.
        """
        self._on_call = on_call
        self._clock = clock
        self._chain_step = chain_step
        self._lengths = model.chain_lengths
        super().__init__(model, window, load, vocabulary)

    def chain_lengths(self, context: Context, branches: bool) -> tuple[int, ...]:
        """How many tokens one call of the model can draft for such a request; none where each needs its own.

        A call chooses by the logits and by noise that is known beforehand, and tells of no runners-up.
        """
        if self._network is None or branches or not drafts_at_once(context):
            return ()
        return self._network.chain_lengths

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """How many steps of the model drafting so many tokens costs, if calls draft as many at once as they can."""
        alone = tokens
        for length in reversed(self._lengths if context is None else self.chain_lengths(context, branches)):
            alone %= length
        return (tokens - alone) * self._chain_step + alone

    def _begin(self, network: Model, cache: KVCache) -> ReadText:
        return ReadText(network, self._window, self._on_call, self._clock, cache)

    def _key(self, context: Context) -> object:
        return context

    def _several(
        self,
        read: ReadText,
        pending: Sequence[int],
        context: Context,
        budget: Budget,
        path: Sequence[int],
        chain: Sequence[Evidence],
    ) -> tuple[Sequence[Candidate], bool] | None:
        lengths = self.chain_lengths(context, budget.branches)
        if not lengths:
            return None
        most = min(budget.tokens - len(chain), budget.ahead(chain))
        steps = max((n for n in lengths if n <= most and read.takes_chain(len(pending), n)), default=0)
        if not steps:
            return None
        noise, inverse = chain_noise(context, path, steps, read.columns, self._vocabulary)
        chosen = chain_candidates(context, read.draft(pending, steps, noise, inverse))
        return chosen, len(chosen) < steps
