"""Drafting with a small language model that shares the target's tokenizer."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.model import Model
from edge_spec.runtime.noise import sample_gumbel
from edge_spec.runtime.proposal import Evidence, Proposal
from edge_spec.runtime.sampling import probabilities, require_finite

# Tokens read at most when the draft is behind: reading a long prompt would take longer than what the draft then saves.
# Qwen2.5-Coder-0.5B agreed with the 1.5B on 66 % of ten answers' tokens if it read 32 tokens of the prompt, 68 % with
# 64, 70 % with 128; only where an answer copies a long prompt does the rest matter much, and there others draft well.
DEFAULT_WINDOW = 32

# How many of the draft's likeliest tokens a place in a tree gets.
_SIBLINGS = 3

# Where the probabilities that count as the same evidence are parted.
_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


# What to expect of its tokens before any was verified: of the likeliest, and of the second and third.
PRIORS: dict[Evidence, float] = {
    ("model",): 0.6,
    **{("model", kind, rank): expected for kind in ("greedy", "coupled") for rank, expected in ((1, 0.2), (2, 0.1))},
}


class ModelDrafter:
    """Lets the draft model continue the text, one token after the other, with a cache of its own."""

    name = "model"

    def __init__(
        self,
        model: Model,
        window: int = DEFAULT_WINDOW,
        on_call: Callable[[int, int, float], None] = lambda rows, past, seconds: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Draft with a model.

        Args:
            model: the draft, whose cache now belongs to this drafter.
            window: most tokens to read where the draft is behind; older ones it never sees.
            on_call: told rows, cached tokens and seconds of every call of the model.
            clock: tells the time, in seconds.
        """
        self._model = model
        self._window = min(window, model.context - 1)
        self._on_call = on_call
        self._clock = clock
        self._first = 0  # where in the text the cache begins
        self._cached: list[int] = []  # the tokens in the cache

    @property
    def memory_bytes(self) -> int:
        """Bytes of the draft's KV cache."""
        return self._model.cache.memory_bytes

    def unread(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens the draft has to read before it can propose what follows ``context`` and ``prefix``."""
        text = [*context.tokens, *prefix]
        return min(len(text) - self._first - self._agreed(text), self._window, len(text))

    def cached(self, context: Context, prefix: Sequence[int] = ()) -> int:
        """How many tokens its cache will hold once it has read them."""
        length = len(context.tokens) + len(prefix) - self._first
        return length if self.unread(context, prefix) < self._window else self._window

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """A chain from the draft model, by the request's own sampling parameters, with siblings where they are wanted.

        A draft that breaks down (NaN, or no token left) ends its proposal there: it costs speed, never the text.
        """
        text = [*context.tokens, *prefix]
        if budget.tokens <= 0 or not text or not budget.another(()):
            return Proposal()
        pending: Sequence[int] = self._catch_up(text)
        chain: list[int] = []
        siblings: list[Sequence[_Candidate]] = []
        evidence: list[Evidence] = []
        laws: list[NDArray[np.float32]] = []
        while len(chain) < budget.tokens and (not chain or budget.another(evidence)):
            if len(self._cached) + len(pending) > self._model.context:
                break
            logits = self._forward(pending)
            try:
                candidates, law = _choose(context, [*prefix, *chain], logits, budget.branches)
            except LogitsError:
                break
            token, reason = candidates[0]
            chain.append(token)
            evidence.append(reason)
            siblings.append(candidates[1:])
            if law is not None:
                laws.append(law)
            pending = (token,)
        return _laid_out(chain, evidence, siblings, laws, budget.tokens)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""

    def rollback(self, length: int) -> None:
        """Drop cached tokens from position ``length`` on."""
        kept = max(length - self._first, 0)
        if kept == 0:
            self._first = 0
        del self._cached[kept:]
        self._model.cache.rollback(len(self._cached))

    def _catch_up(self, text: Sequence[int]) -> Sequence[int]:
        """Read all of the text but a last narrow step, and return the tokens of that step."""
        self._model.cache.rollback(self._agreed(text))
        del self._cached[self._model.cache.length :]
        position = self._first + len(self._cached)
        if len(text) - position > self._window or len(text) - self._first > self._model.context:
            self.rollback(0)
            self._first = position = len(text) - min(self._window, len(text))
        unseen = text[position:]
        if len(unseen) > 2:
            self._read(unseen[:-2])
        return unseen[-2:]

    def _agreed(self, text: Sequence[int]) -> int:
        """How many of the cached tokens the text still has; at most all but its last, which has yet to be answered."""
        if not text:
            return 0
        cached, own = self._cached, text[self._first : -1]
        length = min(len(cached), len(own))
        if cached[:length] == own[:length]:
            return length
        return next(index for index in range(length) if cached[index] != own[index])

    def _read(self, tokens: Sequence[int]) -> None:
        past, started = self._model.cache.length, self._clock()
        self._model.prefill(tokens)
        self._cached.extend(tokens)
        self._on_call(len(tokens), past, self._clock() - started)

    def _forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        past, started = self._model.cache.length, self._clock()
        logits: NDArray[np.float32] = self._model.forward(tokens, (len(tokens) - 1,))[0]
        self._cached.extend(tokens)
        self._on_call(len(tokens), past, self._clock() - started)
        return logits


_Candidate = tuple[int, Evidence]


def usual_evidence(context: Context) -> Evidence:
    """What speaks for a token of the draft model of which no more is known than how it will be chosen."""
    return ("model", "greedy" if context.noise is None else "coupled" if context.coupled else "drawn", 0)


def evidence_of(agreement: Iterable[tuple[float, bool]]) -> Iterator[tuple[Evidence, bool]]:
    """What a calibration's comparison of draft and target says about greedy drafting.

    Args:
        agreement: the probability of the draft's likeliest token, and whether it was the target's.
    """
    return ((("model", "greedy", 0, bisect(_EDGES, share)), agreed) for share, agreed in agreement)


def _choose(
    context: Context, path: Sequence[int], logits: NDArray[np.float32], branches: bool
) -> tuple[Sequence[_Candidate], NDArray[np.float32] | None]:
    """Choose the token after ``path``.

    Args:
        context: the text so far.
        path: tokens behind the text.
        logits: float32 [vocab], the draft's own.
        branches: whether runners-up are wanted.

    Returns:
        The token and its runners-up, with their evidence; and the law the token was drawn from, ``None`` if no rule
        will ask.
    """
    processed = context.pipeline.process_row(logits, context.history, path)
    count = _SIBLINGS if branches else 1
    if context.noise is None:
        tokens = _best(processed, count)
        require_finite(processed[tokens[0]], 0)
        peak = processed[tokens[0]]
        total = float(np.exp(processed - peak).sum())
        shares = [float(np.exp(processed[token] - peak)) / total for token in tokens]
        return _with_evidence("greedy", tokens, shares), None
    law = probabilities(processed[None], context.sampling)[0]
    start, node = len(context.tokens), len(path)
    if context.coupled:
        noise = context.noise.gumbel(start + node, len(law))
        if count == 1:
            tokens = [sample_gumbel(law, noise)]
        else:
            with np.errstate(divide="ignore"):
                tokens = _best(np.log(law) + noise, count)
        return _with_evidence("coupled", tokens, [float(law[token]) for token in tokens]), None
    token = context.noise.round(start).draw_draft(node, law)
    # What is said of a drawn token must not depend on the draw, so it is said of the law.
    return _with_evidence("drawn", [token], [float(law.max())]), law


def _best(scores: NDArray[np.float32], count: int) -> list[int]:
    """The ``count`` highest scores' indices, best first; those of -inf are left out, except the first."""
    best = [int(np.argmax(scores))]
    if count > 1:
        left = scores.copy()
        for _ in range(count - 1):
            left[best[-1]] = -np.inf
            token = int(np.argmax(left))
            if left[token] == -np.inf:
                break
            best.append(token)
    return best


def _with_evidence(kind: str, tokens: Sequence[int], shares: Sequence[float]) -> list[_Candidate]:
    return [
        (token, ("model", kind, rank, bisect(_EDGES, share)))
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True))
    ]


def _laid_out(
    chain: Sequence[int],
    evidence: Sequence[Evidence],
    siblings: Sequence[Sequence[_Candidate]],
    laws: Sequence[NDArray[np.float32]],
    most: int,
) -> Proposal:
    """The chain first, then the runners-up of its places."""
    q = laws or None
    extra = [(depth - 1, *candidate) for depth, others in enumerate(siblings) for candidate in others]
    extra = extra[: most - len(chain)]
    if not extra:
        return Proposal(tuple(chain), q, evidence=tuple(evidence))
    return Proposal(
        (*chain, *(token for _, token, _ in extra)),
        q,
        (*range(-1, len(chain) - 1), *(parent for parent, _, _ in extra)),
        evidence=(*evidence, *(reason for _, _, reason in extra)),
    )
