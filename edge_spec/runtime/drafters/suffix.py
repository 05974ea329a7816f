"""Suffix drafting: propose what followed where the text read as it does now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.ngram_table import LONGEST, NgramTable
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.drafters.suffix_automaton import Match, SuffixAutomaton
from edge_spec.runtime.proposal import Evidence, Proposal

_SIBLINGS = 3  # the most tokens proposed for one place
# Matches are told apart by their length, rounded down to 1, 2, 3, 4, 6, 9 or 16.
_ROUNDED = (0, 1, 2, 3, 4, 4, 6, 6, 6, 9, 9, 9, 9, 9, 9, 9, 16)
_TRUSTED = 2  # from this many tokens on, what the text itself said is not questioned
# A match of n tokens is worth n / (n + _DOUBT): about the share of its continuations that language models agree with.
_DOUBT = 1.5


class _Node(NamedTuple):
    """A token that is proposed.

    Attributes:
        parent: the node before it, as an index into what was chosen; -1: none.
        rank: how many siblings come first.
        token: the token.
        evidence: what speaks for it.
    """

    parent: int
    rank: int
    token: int
    evidence: Evidence


@dataclass
class _Reading:
    """What was read of a text.

    Attributes:
        automaton: of the text as far as it was read.
        text: the context's own list, which grows.
        learned: tokens of it that the table need not learn; ``None``: not known yet.
    """

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    text: list[int] = field(default_factory=list)
    learned: int | None = None


class SuffixDrafter:
    """Continues the text as it went on most often where its longest repeated suffix occurred before.

    A text that does not repeat itself may repeat others: where at most one token matches, a table of them is asked.
    Both answer within microseconds, and the proposal ends where neither knows anything.

    The evidence of a token is ``("suffix", n, majority, rank)``, or ``"ngram"`` where the table proposed it:

    - n: length of the suffix, rounded down. Proposed tokens count, as they do once they are accepted.
    - majority: 0 if the token followed no more often than all others together, 1 if the suffix occurred only once
      before, 2 if the token followed most of several times.
    - rank: how many siblings followed more often. Few of these tokens are accepted: little else tells them apart.

    Attributes:
        table: what other texts said; it learns from what is generated. ``None``: only the text itself counts. May be
            replaced or taken away at any time.
    """

    name = "suffix"

    def __init__(self, table: NgramTable | None = None) -> None:
        """Draft with a table, or without."""
        self.table = table
        self._reading = _Reading()
        self._readings: WeakKeyDictionary[Context, _Reading] = WeakKeyDictionary()

    @property
    def memory_bytes(self) -> int:
        """Memory held by automata and table, in bytes. Token ids themselves belong to the context."""
        readings = {id(reading): reading for reading in (self._reading, *self._readings.values())}
        automata = sum(reading.automaton.memory_bytes for reading in readings.values())
        return automata + (0 if self.table is None else self.table.memory_bytes)

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """What followed the longest suffix of text and prefix that occurred before.

        Args:
            context: the text to continue.
            budget: with branches, rarer continuations join the most frequent one where they are likelier than more of
                it.
            prefix: tokens that are proposed already.

        Returns:
            Tokens of the context and the table; fewer than wanted where nothing is known.
        """
        self._follow(context)
        automaton = self._reading.automaton
        match = automaton.suffix
        for token in prefix:
            match = automaton.advance(match, token)
        tail = [*context.tokens[-LONGEST:], *prefix]
        siblings = _SIBLINGS if budget.branches else 1
        chosen: list[_Node] = []
        # What may be proposed next, the likeliest first: minus its probability, a number, and what comes before it.
        waiting: list[tuple[float, int, _Node, Match, list[int]]] = []
        parent, probability, number = -1, 1.0, 0
        while len(chosen) < budget.tokens:
            for rank, (token, share, evidence) in enumerate(self._continuations(match, tail, siblings)):
                number += 1
                heappush(waiting, (-probability * share, number, _Node(parent, rank, token, evidence), match, tail))
            if not waiting:
                break
            unlikely, _, node, match, tail = heappop(waiting)
            parent, probability = len(chosen), -unlikely
            match, tail = automaton.advance(match, node.token), [*tail[1 - LONGEST :], node.token]
            chosen.append(node)
        return _laid_out(chosen)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: what was accepted is read from the context."""

    def rollback(self, length: int) -> None:
        """Forget the text from ``length`` on. Costs as much as reading again what is left of it."""
        reading = self._reading
        self._learn()
        reading.automaton.truncate(length)
        reading.text, reading.learned = [], None

    def switch(self, context: Context) -> None:
        """Go on with this text."""
        self._learn()
        self._reading = self._readings.setdefault(context, _Reading())

    def _follow(self, context: Context) -> None:
        """Read what is new, and let the table learn it unless it is the prompt."""
        text, reading = context.tokens, self._reading
        reading.automaton.extend(text[len(reading.automaton) :])
        reading.text = text
        if reading.learned is None:
            reading.learned = context.history.prompt_length
        self._learn()

    def _learn(self) -> None:
        reading = self._reading
        if reading.learned is not None:
            if self.table is not None:
                self.table.learn(reading.text, reading.learned)
            reading.learned = len(reading.text)

    def _continuations(self, match: Match, tail: list[int], siblings: int) -> list[tuple[int, float, Evidence]]:
        """What may follow, the most frequent first: token, estimated probability and evidence."""
        source = "suffix"
        length, tokens, counts = self._reading.automaton.continuations(match)
        if self.table is not None and length < _TRUSTED:
            known = self.table.successors(tail)
            if known.context > length:
                source, (length, tokens, counts) = "ngram", known
        if not tokens:
            return []
        total = sum(counts)
        majority = 0 if 2 * counts[0] <= total else 1 if total == 1 else 2
        worth = length / (length + _DOUBT) / total
        found: list[tuple[int, float, Evidence]] = [
            (tokens[0], worth * counts[0], (source, _ROUNDED[min(length, len(_ROUNDED) - 1)], majority, 0))
        ]
        for rank in range(1, min(siblings, len(tokens))):
            found.append((tokens[rank], worth * counts[rank], (source, min(length, 2), 0, rank)))  # noqa: PERF401
        return found


def _laid_out(chosen: Sequence[_Node]) -> Proposal:
    """The nodes as a proposal: first the path that is the most frequent continuation throughout, then the others."""
    trunk: list[int] = []
    for index, node in enumerate(chosen):
        if node.rank == 0 and node.parent == (trunk[-1] if trunk else -1):
            trunk.append(index)
    parents = None
    if len(trunk) < len(chosen):
        order = trunk + sorted(set(range(len(chosen))).difference(trunk))
        place = {old: new for new, old in enumerate(order)}
        chosen = [chosen[old] for old in order]
        parents = tuple([place.get(node.parent, -1) for node in chosen])
    return Proposal(
        tuple([node.token for node in chosen]),
        parents=parents,
        evidence=tuple([node.evidence for node in chosen]),
    )
