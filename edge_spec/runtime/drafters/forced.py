"""Drafts what a request's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from edge_spec.errors import RequestError
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.grammar_walk import GrammarWalk, WalkError
from edge_spec.runtime.proposal import Evidence, Proposal

# What to expect of its tokens before any was verified.
PRIORS: dict[Evidence, float] = {
    ("grammar",): 0.8,
    ("grammar", "forced", "inner"): 0.95,
    ("grammar", "usual", "inner"): 0.9,
    ("grammar", "forced", "last"): 0.4,
}


class ForcedDrafter:
    """Proposes the text that the grammar forces, and that it would force if JSON were written as usual.

    A grammar forces bytes, which can be written with various tokens. Proposed is how the tokenizer writes them. The
    last of these tokens is doubtful, since it may be written as one with what follows: after ``"name`` a schema forces
    ``"``, and models say ``":``.

    The evidence of a token is ``("grammar", "forced" or "usual", "inner" or "last" or "end")``.

    Serves one request: it holds a matcher for each way of writing.
    """

    name = "grammar"
    memory_bytes = 0  # kilobytes, of which llguidance does not tell

    def __init__(self, vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
        """Draft for a request.

        Args:
            vocabulary: the tokens.
            grammar: what the output has to be.
        """
        self._vocabulary = vocabulary
        self._ends = frozenset(vocabulary.end_token_ids)
        self._walks: list[tuple[str, GrammarWalk]] = []
        for kind, part in [
            *(("usual", part) for part in grammar.usual_definitions()),
            ("forced", grammar.definition()),
        ]:
            with suppress(RequestError):  # too large; whether the request is refused for it is up to its mask
                self._walks.append((kind, GrammarWalk(vocabulary, part)))

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """The forced continuation, always a chain; see :class:`Drafter`."""
        output = [*context.tokens[context.history.prompt_length :], *prefix]
        if budget.tokens < 1 or not self._ends.isdisjoint(output):
            return Proposal()
        for kind, walk in tuple(self._walks):
            try:
                tokens, places = self._forced(walk, output)
            except WalkError:
                self._walks.remove((kind, walk))  # a longer output takes no less, and to try takes time
                continue
            if tokens:
                evidence: tuple[Evidence, ...] = tuple(("grammar", kind, place) for place in places)
                return Proposal(tuple(tokens[: budget.tokens]), evidence=evidence[: budget.tokens])
        return Proposal()

    def _forced(self, walk: GrammarWalk, output: list[int]) -> tuple[list[int], list[str]]:
        """The tokens that one way of writing forces, and what each of them is."""
        if not walk.go(output):
            return [], []
        text = walk.forced()
        tokens = self._vocabulary.tokens_of(text) if text else []
        places = ["inner"] * (len(tokens) - 1) + ["last"] * bool(tokens)
        if walk.complete or (tokens and walk.go([*output, *tokens]) and walk.complete):
            places[-1:] = ["inner"] * bool(tokens)  # nothing follows that it could be one with
            return [*tokens, self._vocabulary.end_token_ids[0]], [*places, "end"]
        return tokens, places

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: the grammar says it all."""

    def rollback(self, length: int) -> None:
        """Nothing to forget: an output is followed from where it differs."""
