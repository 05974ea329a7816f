"""Which tokens a request's grammar allows behind each row's own path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import GrammarLimitError
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.grammar_walk import GrammarWalk, WalkError
from edge_spec.runtime.history import History


class GrammarMask:
    """Allows what the grammar does: a function of a row's output alone, drafted tokens included.

    Where the output is complete only the end tokens are left. Where it may end, but need not, they are allowed beside
    the others.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
        """Prepare a request.

        Args:
            vocabulary: the tokens.
            grammar: what the output has to be.

        Raises:
            RequestError: the grammar takes too much, or the bundle's texts cannot end.
        """
        self._size = vocabulary.size
        self._ends = vocabulary.end_token_ids
        self._end_set = frozenset(self._ends)
        self._walk = GrammarWalk(vocabulary, grammar.definition())
        # A draft and the target ask about the same paths: answers for the present text, packed, by path.
        self._output: list[int] = []
        self._answers: dict[tuple[int, ...], NDArray[np.uint8] | None] = {}

    def allowed(self, history: History, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Which tokens may follow.

        Args:
            history: the text that the row's block follows; its prompt is of no account.
            path: the drafted tokens that the row follows beyond it.

        Returns:
            bool [ids of the tokenizer]; ids beyond are never allowed. ``None`` if the path breaks the grammar, and so
            will never be part of a text.

        Raises:
            GrammarLimitError: the grammar takes too much to tell.
        """
        output = history.tokens[history.prompt_length :]
        if output != self._output:
            self._output, self._answers = output, {}
        key = tuple(path)
        if key not in self._answers:
            self._answers[key] = self._answer([*output, *key], len(history.tokens) + len(key))
        bits = self._answers[key]
        return None if bits is None else np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def _answer(self, output: list[int], position: int) -> NDArray[np.uint8] | None:
        if not self._end_set.isdisjoint(output):
            # Nothing behind it is part of the text. The round that reaches so far is told nothing that could fail.
            mask = np.zeros(self._size, np.bool_)
            mask[list(self._ends)] = True
            return np.packbits(mask, bitorder="little")
        try:
            return self._walk.allowed() if self._walk.go(output) else None
        except WalkError as error:
            raise GrammarLimitError(
                f"it takes too much time or memory to tell what the grammar allows ({error}); "
                "make it less ambiguous, with fewer ways to go on",
                0,
                position,
            ) from error
