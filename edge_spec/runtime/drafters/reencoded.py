"""Drafting with a model that has a tokenizer of its own: it reads the text, and its text is proposed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.errors import BundleError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.model_choice import EDGES, known_columns
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.drafters.read_text import ReadText
from edge_spec.runtime.drafters.reencoded_text import ReencodedText
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Evidence, Proposal

# What a proposal's steps and tokens weigh in their moving averages.
_GAIN = 0.05


class ReencodedDrafter(ModelDrafter):
    """Drafts greedily in the draft's own tokens and proposes the target's tokens for that text.

    The two vocabularies have no common law, so nothing is drawn: what is proposed follows from the text alone, and any
    rule may verify it. For the same reason it takes no runners-up and knows nothing of a request's penalties or masks;
    they decide at the verification.
    """

    def __init__(self, model: Model, text: ReencodedText, steps_per_token: float, **options: Any) -> None:
        """Draft with a model.

        Args:
            model: the draft.
            text: translates.
            steps_per_token: how many of the draft's tokens spell one of the target's, as far as is known.
            options: as for :class:`ModelDrafter`.

        Raises:
            RequestError: the window is too small.
        """
        super().__init__(model, **options)
        self._text = text
        # Moving averages of what a proposal takes and brings.
        self._steps, self._brought = steps_per_token, 1.0

    def steps(self, tokens: int, context: Context | None, branches: bool) -> float:
        """Steps of the draft for so many proposed tokens, as lately."""
        return tokens * self._steps / self._brought

    def chain_lengths(self, context: Context, branches: bool) -> tuple[int, ...]:
        """None: it looks at the text after each token."""
        return ()

    def usual_evidence(self, context: Context) -> Evidence:
        """What speaks for a token of which no more is known."""
        return ("model", _kind(context), 0)

    def rollback(self, length: int) -> None:
        """Forget the text, if another begins. What is read again is compared with what was read."""
        if length == 0:
            super().rollback(0)

    def _as_read(self, context: Context, prefix: Sequence[int]) -> Sequence[int]:
        if not self.ready:
            return ()
        try:
            return self._text.read([*context.tokens, *prefix])
        except BundleError as error:  # one of the tokenizers fails on this text
            self._give_up(error)
            return ()

    def _draft(
        self, read: ReadText, text: Sequence[int], context: Context, budget: Budget, prefix: Sequence[int]
    ) -> Proposal:
        pending: Sequence[int] = read.catch_up(text)
        drafted: list[int] = []
        tokens: list[int] = []
        shares: list[float] = []  # for every token, how likely the draft finds it behind those before it
        while len(tokens) < budget.tokens and (not tokens or budget.another(_evidence(context, shares))):
            if len(drafted) == 2 * budget.tokens + _MOST_SILENT or not read.takes(len(pending)):
                break
            logits, vocabulary, left_out = known_columns(read.step(pending), self._vocabulary)
            column = int(np.argmax(logits))
            peak = logits[column]
            if not np.isfinite(peak):
                break
            share = 1.0 / (float(np.exp(logits - peak).sum()) + float(np.exp(left_out - peak)))
            drafted.append(vocabulary.id_of(column))
            before, tokens = tokens, self._text.write(text, drafted)
            shares = _shares(before, tokens, shares, share)
            pending = drafted[-1:]
            if self._text.ends(drafted[-1]):
                break
        self._steps += _GAIN * (len(drafted) - self._steps)
        self._brought += _GAIN * (len(tokens) - self._brought)
        proposal = Proposal(tuple(tokens), evidence=_evidence(context, shares))
        return proposal.first(budget.tokens)


# Steps that may bring nothing yet, since a character needs more of them.
_MOST_SILENT = 8


def _shares(before: Sequence[int], after: Sequence[int], shares: Sequence[float], share: float) -> list[float]:
    """Which share of the draft's belief every token has, once another step of the draft has had its say.

    Args:
        before: the tokens written until now.
        after: those written with the new one, which may replace the last of them.
        shares: those of ``before``.
        share: the draft's probability of the new one.
    """
    common = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    new = len(after) - common
    # The first of the new tokens holds all that was believed since; with it, those behind it are as good as sure.
    return [*shares[:common], *([float(np.prod(shares[common:])) * share] if new else []), *([1.0] * (new - 1))]


def _kind(context: Context) -> str:
    return "greedy" if context.noise is None else "likeliest"


def _evidence(context: Context, shares: Sequence[float]) -> tuple[Evidence, ...]:
    return tuple(("model", _kind(context), 0, bisect(EDGES, share)) for share in shares)
