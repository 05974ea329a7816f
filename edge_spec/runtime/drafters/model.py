"""Drafting with a small language model that shares the target's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError, ProviderError, RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.model_choice import (
    Candidate,
    chain_candidates,
    chain_noise,
    choose,
    drafts_at_once,
    known_columns,
    laid_out,
    usual_evidence,
)
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.drafters.read_text import ReadText
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence, Proposal

_LOG = logging.getLogger(__name__)

# A token to go on from, and the one behind it.
LEAST_WINDOW = 2


class ModelDrafter:
    """Lets the draft model continue the text, one token after the other, with a cache of its own.

    The model may be given up where memory is short, and loaded again later. Meanwhile nothing is proposed.
    """

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
        self._chain_step = chain_step
        self._lengths = model.chain_lengths
        self._window = _checked(model.context if window is None else window)
        self._on_call = on_call
        self._clock = clock
        self._load = load
        self._vocabulary = vocabulary
        self._readings: WeakKeyDictionary[Context, ReadText] = WeakKeyDictionary()  # the latest comes last
        self._model: Model | None = model
        self._read: ReadText | None = self._begin(model)

    @property
    def ready(self) -> bool:
        """Whether the model is there."""
        return self._read is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the draft's KV caches."""
        return sum(read.memory_bytes for read in (*self._others(), self._read) if read is not None)

    @property
    def window(self) -> int:
        """Most tokens in the cache of a text, and about as many in those of all texts together."""
        return self._window

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """How many steps of the model drafting so many tokens costs, if calls draft as many at once as they can."""
        alone = tokens
        for length in reversed(self._lengths if context is None else self.chain_lengths(context, branches)):
            alone %= length
        return (tokens - alone) * self._chain_step + alone

    def chain_lengths(self, context: Context, branches: bool) -> tuple[int, ...]:
        """How many tokens one call of the model can draft for such a request; none where each needs its own.

        A call chooses by the logits and by noise that is known beforehand, and tells of no runners-up.
        """
        if self._model is None or branches or not drafts_at_once(context):
            return ()
        return self._model.chain_lengths

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen."""
        return usual_evidence(context)

    def bytes_beyond(self, window: int) -> int:
        """Bytes that :meth:`narrow` would give back."""
        others = sum(other.memory_bytes for other in self._others())
        return 0 if self._read is None else others + self._read.bytes_beyond(window)

    def narrow(self, window: int) -> None:
        """Hold at most ``window`` tokens in the cache from now on, and give back the memory of the others.

        A window wider than before lets the cache grow again. Raises RequestError if it is too small.
        """
        self._window = _checked(window)
        if self._read is not None:
            for other in self._others():
                self._forget(other)
            self._read.narrow(window)

    def unload(self) -> None:
        """Give the model up, and so its memory, unless somebody else holds it too. Doing so twice does no harm."""
        self._model = self._read = None
        self._readings.clear()

    def reload(self) -> None:
        """Load the model again if it was given up; it has then read nothing.

        Raises:
            RequestError: nobody said how to load it.
            Exception: whatever loading raises; the model is then still away.
        """
        if self._read is not None:
            return
        if self._load is None:
            raise RequestError("The draft model cannot come back; give its drafter a function that loads it.")
        model = self._load()
        self._model, self._read = model, self._begin(model)

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens the draft has to read before it can propose what follows ``context`` and ``prefix``."""
        text = self._as_read(context, prefix)
        return 0 if self._read is None else self._read.unread(text)

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        text = self._as_read(context, prefix)
        return 0 if self._read is None else self._read.cached_after(text)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A chain from the draft model, by the request's own sampling parameters, with siblings where they are wanted.

        A draft that breaks down costs speed, never the text: where its logits leave no token (NaN), its proposal ends,
        and where ONNX Runtime fails, it is given up.
        """
        text = self._as_read(context, prefix)
        if self._read is None or budget.tokens <= 0 or not text or not budget.another(()):
            return Proposal()
        try:
            return self._draft(self._read, text, context, budget, prefix)
        except ProviderError as error:
            _LOG.warning("the draft model is given up: %s", error)
            self.unload()
            return Proposal()

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Forget what was read from position ``length`` on."""
        if self._read is not None:
            self._read.rollback(length)

    def switch(self, context: Context) -> None:
        """Go on with this text. What was read of others is kept as long as the window has room for all of them."""
        if self._model is None:
            return
        read = self._readings.pop(context, None)
        if read is None:
            free = all(other.cache is not self._model.cache for other in self._readings.values())
            read = self._begin(self._model, self._model.cache if free else self._model.new_cache())
        self._readings[context] = self._read = read

    def _as_read(self, context: Context, prefix: Sequence[int]) -> Sequence[int]:
        """The text as the model reads it."""
        return [*context.tokens, *prefix]

    def _draft(
        self, read: ReadText, text: Sequence[int], context: Context, budget: Budget, prefix: Sequence[int]
    ) -> Proposal:
        self._make_room(read, min(read.cached_after(text) + budget.tokens, self._window))
        pending: Sequence[int] = read.catch_up(text)
        chain: list[int] = []
        siblings: list[Sequence[Candidate]] = []
        evidence: list[Evidence] = []
        laws: list[NDArray[np.float32]] = []
        lengths = self.chain_lengths(context, budget.branches)
        while len(chain) < budget.tokens and (not chain or budget.another(evidence)):
            if not read.takes(len(pending)):
                break
            most = min(budget.tokens - len(chain), budget.ahead(evidence)) if lengths else 0
            steps = max((n for n in lengths if n <= most and read.takes_chain(len(pending), n)), default=0)
            if steps:
                noise, inverse = chain_noise(context, [*prefix, *chain], steps, read.columns, self._vocabulary)
                chosen = chain_candidates(context, read.draft(pending, steps, noise, inverse))
                chain += [token for token, _ in chosen]
                evidence += [reason for _, reason in chosen]
                siblings += [()] * len(chosen)
                if len(chosen) < steps:
                    break
                pending = chain[-1:]
                continue
            logits, vocabulary, left_out = known_columns(read.step(pending), self._vocabulary)
            try:
                candidates, law = choose(context, [*prefix, *chain], logits, budget.branches, vocabulary, left_out)
            except LogitsError:
                break
            token, reason = candidates[0]
            chain.append(token)
            evidence.append(reason)
            siblings.append(candidates[1:])
            if law is not None:
                laws.append(law)
            pending = (token,)
        return laid_out(chain, evidence, siblings, laws, budget.tokens)

    def _begin(self, model: Model, cache: KVCache | None = None) -> ReadText:
        return ReadText(model, self._window, self._on_call, self._clock, cache)

    def _others(self) -> list[ReadText]:
        """What was read of texts that have not the turn, those longest without one first."""
        return [other for other in list(self._readings.values()) if other is not self._read]

    def _make_room(self, read: ReadText, tokens: int) -> None:
        """Take caches of other texts, if they and one for so many tokens are more than one whole window."""
        others = self._others()
        if not others:
            return
        room = read.cache.slots_for(self._window) - max(read.cache.capacity, read.cache.slots_for(tokens))
        while others and sum(other.cache.capacity for other in others) > room:
            self._forget(others.pop(0))

    def _forget(self, read: ReadText) -> None:
        for context, other in list(self._readings.items()):
            if other is read:
                del self._readings[context]
        if self._model is not None:
            self._model.shrink(read.cache)


def _checked(window: int) -> int:
    if window < LEAST_WINDOW:
        raise RequestError(f"The draft's window is {window} tokens, expected at least {LEAST_WINDOW}.")
    return window
