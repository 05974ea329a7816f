"""Searching a whole text for what a suffix automaton knows at once."""

from __future__ import annotations

from collections import Counter


def ends(text: list[int], substring: list[int]) -> list[int]:
    """Where it ends in the text, from the first occurrence to the last."""
    length = len(substring)
    return [end for end in range(length, len(text) + 1) if text[end - length : end] == substring]


def longest_suffix(text: list[int], query: list[int]) -> int:
    """Length of the longest suffix of ``query`` that is in the text."""
    return next(length for length in range(len(query), -1, -1) if ends(text, query[len(query) - length :]))


def naive_continuations(text: list[int], query: list[int]) -> tuple[int, list[int], list[int]]:
    """What followed the longest suffix of ``query`` that anything followed: most often first, then latest first."""
    for length in range(len(query), 0, -1):
        followed = [end for end in ends(text, query[len(query) - length :]) if end < len(text)]
        if followed:
            counts = Counter(text[end] for end in followed)
            last = {text[end]: end for end in followed}
            tokens = sorted(counts, key=lambda token: (counts[token], last[token]), reverse=True)
            return length, tokens, [counts[token] for token in tokens]
    return 0, [], []
