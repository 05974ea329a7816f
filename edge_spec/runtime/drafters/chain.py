"""Drafting token by token with a network that remembers what it has read of each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError, ProviderError
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.model_choice import Candidate, choose, known_columns, laid_out, usual_evidence
from edge_spec.runtime.drafters.network import AnyNetwork, NetworkDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.reading import ChainReading
from edge_spec.runtime.proposal import Evidence, Proposal

AnyChainReading = TypeVar("AnyChainReading", bound=ChainReading)


class ChainDrafter(NetworkDrafter[AnyNetwork, AnyChainReading], Generic[AnyNetwork, AnyChainReading]):
    """Lets a network continue the text, one token after the other."""

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
        super().__init__(network, window, load)
        self._vocabulary = vocabulary

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known than how it will be chosen."""
        return usual_evidence(context, self.name)

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
            self._give_up(error)
            return Proposal()

    def _as_read(self, context: Context, prefix: Sequence[int]) -> Sequence[int]:
        """The text as the network reads it."""
        return [*context.tokens, *prefix]

    def _several(
        self,
        read: AnyChainReading,
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
        self, read: AnyChainReading, text: Sequence[int], context: Context, budget: Budget, prefix: Sequence[int]
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
