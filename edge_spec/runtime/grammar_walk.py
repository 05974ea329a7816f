"""A matcher that is led from one text to the next by what they have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.grammar import bounded
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Why a matcher stops where no token goes on, though the text must.
_DEAD_END = "NoExtension"


class WalkError(Exception):
    """The matcher gave up: the grammar is too ambiguous here, or too large."""


class GrammarWalk:
    """Where a grammar is after an output. Going to another one costs what the two do not share.

    What it says of an output does not depend on where it was before.
    """

    def __init__(self, vocabulary: GrammarVocabulary, definition: str) -> None:
        """Begin.

        Args:
            vocabulary: the tokens.
            definition: the grammar as llguidance reads it.

        Raises:
            RequestError: the grammar takes too much.
        """
        self._vocabulary = vocabulary
        self._definition = definition
        self._matcher: LLMatcher | None = vocabulary.matcher(definition)
        self._tokens: list[int] = []  # what the matcher has read
        self._output: Sequence[int] = ()

    def go(self, output: Sequence[int]) -> bool:
        """Go where ``output`` leads, which holds no end token.

        Returns:
            Whether it obeys the grammar so far. If not, there is nothing to be asked here.

        Raises:
            WalkError: it takes too much to tell.
        """
        self._output = output
        tokens = self._vocabulary.spelled(output)
        shared = _shared(self._tokens, tokens)
        matcher = self._led()
        if shared < len(self._tokens):
            matcher.rollback(len(self._tokens) - shared)
        read = matcher.try_consume_tokens(tokens[shared:]) if shared < len(tokens) else 0
        self._tokens = tokens[: shared + read]
        self._require_sound()
        return shared + read == len(tokens)

    def allowed(self) -> NDArray[np.uint8]:
        """Which tokens may come next, a bit each, uint8 [ceil(size / 8)], the lowest first.

        Raises:
            WalkError: it takes too much to tell.
        """
        bits = self._bits()
        return self._vocabulary.completed(bits, first=not self._output)

    def forced(self) -> bytes:
        """The bytes that every text goes on with here, possibly none.

        Raises:
            WalkError: it takes too much to tell.
        """
        text = bytes(self._led().compute_ff_bytes())
        self._require_sound()
        return text

    @property
    def complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return bool(self._led().is_stopped())

    def _bits(self) -> NDArray[np.uint8]:
        matcher = self._led()
        try:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            problem: Exception | None = error
        else:
            problem = None
        if matcher.is_error() and matcher.get_error().startswith(_DEAD_END):
            self._restart()
            return np.zeros((self._vocabulary.size + 7) // 8, np.uint8)
        self._require_sound()
        if problem is not None:
            self._restart()
            raise WalkError(bounded(str(problem))) from problem
        return bits

    def _require_sound(self) -> None:
        matcher = self._led()
        if matcher.is_error():
            reason = bounded(matcher.get_error())
            self._restart()
            raise WalkError(reason)

    def _restart(self) -> None:
        """Begin again, since a matcher that gave up never recovers."""
        self._matcher = None
        self._tokens, self._output = [], ()

    def _led(self) -> LLMatcher:
        """The matcher. A new one is made when it is asked, which after an error is mostly never."""
        if self._matcher is None:
            self._matcher = self._vocabulary.matcher(self._definition)
        return self._matcher


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin alike."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return bisect_right(range(1, shorter + 1), False, key=lambda length: one[:length] != other[:length])
