"""Drafting token by token with a network that remembers what it has read of each text."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError, ProviderError, RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.model_choice import Candidate, choose, known_columns, laid_out, usual_evidence
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.drafters.reading import Network, Reading
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.proposal import Evidence, Proposal

_LOG = logging.getLogger(__name__)

# A token to go on from, and the one behind it.
LEAST_WINDOW = 2

AnyNetwork = TypeVar("AnyNetwork", bound=Network)
AnyReading = TypeVar("AnyReading", bound=Reading)


class ChainDrafter(ABC, Generic[AnyNetwork, AnyReading]):
    """Lets a network continue the text, one token after the other.

    The network may be given up where memory is short, and loaded again later. Meanwhile nothing is proposed.
    """

    name: str

    def __init__(
        self,
        network: AnyNetwork,
        window: int | None = None,
        load: Callable[[], AnyNetwork] | None = None,
        vocabulary: DraftVocabulary = WHOLE,
    ) -> None:
        """Draft with a network.

        Args:
            network: now belongs to this drafter, with its cache.
            window: most tokens in the cache; ``None`` for all of the network's context.
            load: loads the network again, once it was given up.
            vocabulary: what the columns of its logits stand for.

        Raises:
            RequestError: the window is too small.
        """
        self._window = _checked(network.context if window is None else window)
        self._load = load
        self._vocabulary = vocabulary
        # By what a text is known by; the latest comes last.
        self._readings: WeakKeyDictionary[Any, AnyReading] = WeakKeyDictionary()
        self._network: AnyNetwork | None = network
        self._read: AnyReading | None = self._begin(network)

    @abstractmethod
    def _begin(self, network: AnyNetwork, cache: KVCache | None = None) -> AnyReading:
        """A text of which nothing has been read.

        Args:
            network: reads it.
            cache: of the network, which now belongs to this text; by default the one it works on.
        """

    @abstractmethod
    def _key(self, context: Context) -> object:
        """What the text is known by, for as long as it may go on."""

    @property
    def ready(self) -> bool:
        """Whether the network is there."""
        return self._read is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the KV caches."""
        return sum(read.memory_bytes for read in (*self._others(), self._read) if read is not None)

    @property
    def window(self) -> int:
        """Most tokens in the cache of a text, and about as many in those of all texts together."""
        return self._window

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen."""
        return usual_evidence(context, self.name)

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
        """Give the network up, and so its memory, unless somebody else holds it too. Doing so twice does no harm."""
        self._network = self._read = None
        self._readings.clear()

    def reload(self) -> None:
        """Load the network again if it was given up; it has then read nothing.

        Raises:
            RequestError: nobody said how to load it.
            Exception: whatever loading raises; the network is then still away.
        """
        if self._read is not None:
            return
        if self._load is None:
            raise RequestError(f"The {_called(self.name)} cannot come back; give its drafter a function that loads it.")
        network = self._load()
        self._network, self._read = network, self._begin(network)

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens the network has to read before it can propose what follows ``context`` and ``prefix``."""
        text = self._as_read(context, prefix)
        return 0 if self._read is None else self._read.unread(text)

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        text = self._as_read(context, prefix)
        return 0 if self._read is None else self._read.cached_after(text)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A chain from the network, by the request's own sampling parameters, with siblings where they are wanted.

        A network that breaks down costs speed, never the text: where its logits leave no token (NaN), its proposal
        ends, and where ONNX Runtime fails, it is given up.
        """
        text = self._as_read(context, prefix)
        if self._read is None or budget.tokens <= 0 or not text or not budget.another(()):
            return Proposal()
        try:
            return self._draft(self._read, text, context, budget, prefix)
        except ProviderError as error:
            _LOG.warning("the %s is given up: %s", _called(self.name), error)
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
        if self._network is None:
            return
        key = self._key(context)
        read = self._readings.pop(key, None)
        if read is None:
            free = all(other.cache is not self._network.cache for other in self._readings.values())
            read = self._begin(self._network, self._network.cache if free else self._network.new_cache())
        self._readings[key] = self._read = read

    def _as_read(self, context: Context, prefix: Sequence[int]) -> Sequence[int]:
        """The text as the network reads it."""
        return [*context.tokens, *prefix]

    def _several(
        self,
        read: AnyReading,
        pending: Sequence[int],
        context: Context,
        budget: Budget,
        path: Sequence[int],
        chain: Sequence[Evidence],
    ) -> tuple[Sequence[Candidate], bool] | None:
        """Draft several tokens at once, if the network can and that is wanted.

        Args:
            read: what was read.
            pending: tokens to be read first.
            context: the text so far.
            budget: how much may be proposed.
            path: tokens behind the text that are proposed already.
            chain: what speaks for those of them that are this drafter's.

        Returns:
            The tokens with their evidence, and whether the network broke down behind them; ``None`` if the next token
            is to be drafted by a call of its own.
        """
        return None

    def _draft(
        self, read: AnyReading, text: Sequence[int], context: Context, budget: Budget, prefix: Sequence[int]
    ) -> Proposal:
        self._make_room(read, min(read.cached_after(text) + budget.tokens, self._window))
        pending: Sequence[int] = read.catch_up(text)
        chain: list[int] = []
        siblings: list[Sequence[Candidate]] = []
        evidence: list[Evidence] = []
        laws: list[NDArray[np.float32]] = []
        while len(chain) < budget.tokens and (not chain or budget.another(evidence)):
            if not pending or not read.takes(len(pending)):
                break
            path = [*prefix, *chain]
            several = self._several(read, pending, context, budget, path, evidence)
            if several is not None:
                chosen, broken = several
                chain += [token for token, _ in chosen]
                evidence += [reason for _, reason in chosen]
                siblings += [()] * len(chosen)
                if broken:
                    break
                pending = chain[-1:]
                continue
            logits, vocabulary, left_out = known_columns(read.step(pending), self._vocabulary)
            try:
                candidates, law = choose(context, path, logits, budget.branches, vocabulary, left_out, self.name)
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

    def _others(self) -> list[AnyReading]:
        """What was read of texts that have not the turn, those longest without one first."""
        return [other for other in list(self._readings.values()) if other is not self._read]

    def _make_room(self, read: AnyReading, tokens: int) -> None:
        """Take caches of other texts, if they and one for so many tokens are more than one whole window."""
        others = self._others()
        if not others:
            return
        room = read.cache.slots_for(self._window) - max(read.cache.capacity, read.cache.slots_for(tokens))
        while others and sum(other.cache.capacity for other in others) > room:
            self._forget(others.pop(0))

    def _forget(self, read: AnyReading) -> None:
        for key, other in list(self._readings.items()):
            if other is read:
                del self._readings[key]
        if self._network is not None:
            self._network.shrink(read.cache)


def _called(name: str) -> str:
    """What messages call the network of a drafter with this name."""
    return "draft model" if name == "model" else name


def _checked(window: int) -> int:
    if window < LEAST_WINDOW:
        raise RequestError(f"The draft's window is {window} tokens, expected at least {LEAST_WINDOW}.")
    return window
