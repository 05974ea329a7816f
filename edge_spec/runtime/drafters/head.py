"""Drafting with a small recurrent network that reads the target's hidden states: EAGLE-3, and layers for MTP."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.chain import ChainDrafter
from edge_spec.runtime.drafters.read_taps import ReadTaps
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model


class HeadDrafter(ChainDrafter[HeadModel, ReadTaps]):
    """Lets a recurrent head continue the text, one token after the other, with a cache of its own.

    A text is known by the target's cache, which also outlives a turn of a conversation: what the head has read of the
    text so far need not be read again in the next one.
    """

    name = "head"

    def __init__(
        self,
        model: HeadModel,
        target: Model,
        window: int | None = None,
        on_call: Callable[..., None] = lambda *call: None,
        clock: Callable[[], float] = perf_counter,
        load: Callable[[], HeadModel] | None = None,
        vocabulary: DraftVocabulary = WHOLE,
    ) -> None:
        """Draft with a head.

        Args:
            model: the head, which now belongs to this drafter, with its cache.
            target: the model whose text it is; its caches keep the hidden states that the head reads.
            window: most rows in the cache; ``None`` for all of the head's context.
            on_call: told rows, cached rows and seconds of every call of the head.
            clock: tells the time, in seconds.
            load: loads the head again, once it was given up.
            vocabulary: what the columns of its logits stand for.

        Raises:
            RequestError: the window is too small.
        """
        self._target = target
        self._on_call = on_call
        self._clock = clock
        super().__init__(model, window, load, vocabulary)

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """Each token takes a call."""
        return tokens

    def _begin(self, network: HeadModel, cache: KVCache) -> ReadTaps:
        return ReadTaps(network, self._window, self._target, self._on_call, self._clock, cache)

    def _key(self, context: Context) -> object:
        return self._target.cache
