"""A suffix automaton of a growing text: every earlier place that reads like its end, at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

# A weight holds how often a state's substrings occur above how far the last occurrence reaches: one integer to compare.
_END_BITS = 40
_END_MASK = (1 << _END_BITS) - 1

# States whose weight one appended token may raise, the longest suffix first. Few texts ever have as many: one that
# repeats itself over and over has, and there the shorter suffixes are counted too rarely.
_MAX_COUNTED = 32

_TABLE_BYTES = sys.getsizeof({0: 0})  # of a state with up to _TABLE_TRANSITIONS
_TABLE_TRANSITIONS = 5
_TRANSITION_BYTES = 45  # of every further one, on average
_INTEGER_BYTES = sys.getsizeof(1) + sys.getsizeof(1 << _END_BITS)  # a state's number and its weight


class Match(NamedTuple):
    """A suffix of the text, or of the text and tokens after it, that occurs in the text.

    Attributes:
        state: where the automaton is after reading it.
        length: tokens of the suffix; 0: not even the last token occurs.
    """

    state: int
    length: int


class SuffixAutomaton:
    """The smallest automaton that reads every substring of a text (Blumer et al. 1985), built token by token.

    A state stands for the substrings that end at the same places. Its link leads to the longest of their suffixes that
    also ends elsewhere. The whole text ends at one place only, so its link is the longest suffix that occurred before.
    How often a token followed a substring is the number of places where the state that it leads to ends.

    Appending costs O(1), amortised, and a text has at most two states and three transitions a token.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        """Read ``tokens``."""
        self._clear()
        self.extend(tokens)

    def _clear(self) -> None:
        self._tokens: list[int] = []
        # One entry for each state; state 0 has read nothing.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._weight: list[int] = [0]
        self._whole: int = 0  # the state that has read the whole text
        self._crowded: int = 0  # transitions beyond _TABLE_TRANSITIONS of their state

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def memory_bytes(self) -> int:
        """Memory held, in bytes, estimated from what was counted. Token ids themselves belong to the text."""
        lists = (self._tokens, self._next, self._link, self._length, self._weight)
        return (
            sum(map(sys.getsizeof, lists))
            + len(self._next) * (_TABLE_BYTES + _INTEGER_BYTES)
            + self._crowded * _TRANSITION_BYTES
        )

    @property
    def suffix(self) -> Match:
        """The longest suffix of the text that occurred before."""
        state = max(self._link[self._whole], 0)
        return Match(state, self._length[state])

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the text."""
        text, whole, crowded = self._tokens, self._whole, self._crowded
        transitions, link, length, weight = self._next, self._link, self._length, self._weight
        for token in tokens:
            text.append(token)
            end = len(text)
            suffix, whole = whole, len(link)
            transitions.append({})
            length.append(end)
            weight.append(0)
            while suffix >= 0 and token not in (table := transitions[suffix]):
                crowded += len(table) >= _TABLE_TRANSITIONS
                table[token] = whole
                suffix = link[suffix]
            if suffix < 0:
                link.append(0)
            else:
                longer = transitions[suffix][token]
                if length[longer] == length[suffix] + 1:
                    link.append(longer)
                else:
                    # The suffix and the longer substring part here: the suffix now ends at one place more.
                    shorter = whole + 1
                    link += (shorter, link[longer])
                    link[longer] = shorter
                    table = transitions[longer].copy()
                    crowded += max(len(table) - _TABLE_TRANSITIONS, 0)
                    transitions.append(table)
                    length.append(length[suffix] + 1)
                    weight.append(weight[longer])
                    while suffix >= 0 and (table := transitions[suffix]).get(token) == longer:
                        table[token] = shorter
                        suffix = link[suffix]
            counted = whole
            for _ in range(_MAX_COUNTED):
                weight[counted] = (weight[counted] | _END_MASK) + 1 + end
                counted = link[counted]
                if counted <= 0:
                    break
        self._whole, self._crowded = whole, crowded

    def truncate(self, length: int) -> None:
        """Forget the text from ``length`` on. Costs as much as reading again what is left."""
        if length < len(self._tokens):
            kept = self._tokens[: max(length, 0)]
            self._clear()
            self.extend(kept)

    def advance(self, match: Match, token: int) -> Match:
        """What a match becomes when ``token`` follows: the longest suffix with it that occurs in the text."""
        state, length = match
        while token not in self._next[state]:
            if not state:
                return Match(0, 0)
            state = self._link[state]
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def continuations(self, match: Match) -> tuple[int, list[int], list[int]]:
        """What followed a match before, or its longest suffix that anything followed.

        Returns:
            How many tokens that suffix has; the tokens that followed it, the most frequent first and of those as
            frequent the most recent; and how often each did.
        """
        state, length = match
        if state == self._whole:
            state = max(self._link[state], 0)
            length = self._length[state]
        if not length:
            return 0, [], []
        text = self._tokens
        weights = [self._weight[longer] for longer in self._next[state].values()]
        weights.sort(reverse=True)
        # The substrings of a state all end in the token that leads to it.
        return (
            length,
            [text[(weight & _END_MASK) - 1] for weight in weights],
            [weight >> _END_BITS for weight in weights],
        )
