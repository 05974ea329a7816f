"""Prompt lookup: when the text repeats itself, propose what followed the last time."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.proposal import Proposal

_INTEGER_BYTES = sys.getsizeof(2**20)


class LookupDrafter:
    """Finds the most recent earlier occurrence of the longest suffix n-gram and proposes what followed it.

    An index from n-gram to the position after its last occurrence grows with the text, so a round costs time
    proportional to the tokens it added. What each insertion overwrote is kept, so a rollback costs time
    proportional to the tokens it removes.

    The evidence of a token is ``("lookup", n, place)``: tokens of the n-gram, and how many were proposed before it, at
    most 3.

    Args:
        max_ngram: length of the longest suffix looked for.
        min_ngram: length of the shortest.

    Raises:
        RequestError: not 1 <= min_ngram <= max_ngram.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise RequestError(
                f"min_ngram is {min_ngram!r} and max_ngram is {max_ngram!r}, expected 1 <= min_ngram <= max_ngram"
            )
        self._lengths = range(min_ngram, max_ngram + 1)
        self._tokens: list[int] = []  # the tokens indexed so far
        self._last_end: dict[tuple[int, ...], int] = {}
        self._overwritten = array("q")  # [indexed tokens, n-gram lengths]; 0: the n-gram was new
        self._key_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Memory held by the index, in bytes. Token ids themselves belong to the context."""
        return (
            sys.getsizeof(self._last_end)
            + self._key_bytes
            + sys.getsizeof(self._tokens)
            + _INTEGER_BYTES * len(self._tokens)
            + sys.getsizeof(self._overwritten)
        )

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """What followed the longest suffix that occurred before; the last occurrence counts.

        Args:
            context: the text to continue.
            budget: the most tokens to propose, always as a chain.
            prefix: tokens that are proposed already. The suffix ends with them, but they are not looked through.

        Returns:
            Tokens of the context; none if even the shortest suffix is new.
        """
        tokens = context.tokens
        if budget.tokens < 1 or not tokens:
            return Proposal()
        self._follow(context)
        tail = (*tokens[-self._lengths[-1] :], *prefix)
        for length in reversed(self._lengths):
            end = self._last_end.get(tail[-length:])
            if end is not None:
                found = tuple(tokens[end : end + budget.tokens])
                return Proposal(found, evidence=tuple(("lookup", length, min(i, 3)) for i in range(len(found))))
        return Proposal()

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: the context says it all."""

    def rollback(self, length: int) -> None:
        """Forget the n-grams that reach beyond the first ``length`` tokens."""
        for end in range(len(self._tokens), max(length, 0), -1):
            for size in reversed(self._lengths):
                before = self._overwritten.pop()
                if size > end:
                    continue
                ngram = tuple(self._tokens[end - size : end])
                if before:
                    self._last_end[ngram] = before
                else:
                    del self._last_end[ngram]
                    self._key_bytes -= sys.getsizeof(ngram)
            self._tokens.pop()

    def _follow(self, context: Context) -> None:
        """Make the index cover the context except its last token, so that the suffix cannot find itself."""
        tokens = context.tokens
        self.rollback(len(tokens) - 1)
        for end in range(len(self._tokens) + 1, len(tokens)):
            self._tokens.append(tokens[end - 1])
            for size in self._lengths:
                if size > end:
                    self._overwritten.append(0)
                    continue
                ngram = tuple(self._tokens[end - size : end])
                before = self._last_end.get(ngram, 0)
                if not before:
                    self._key_bytes += sys.getsizeof(ngram)
                self._overwritten.append(before)
                self._last_end[ngram] = end
