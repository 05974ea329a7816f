"""The tokens a row of logits follows: the text so far, and the drafted path behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray


class History:
    """Prompt and output so far, counted as they come.

    Counting is lazy and incremental: each token is looked at once, and not at all where nobody asks for the counts.

    Attributes:
        tokens: prompt and output in order: the list that was given, not a copy. Its owner may append to it; it is cut
            through :meth:`rollback` only.
        prompt_length: how many of them are the prompt.
    """

    def __init__(self, tokens: list[int], prompt_length: int | None = None) -> None:
        """Follow ``tokens``; by default all of them, as of now, are the prompt."""
        self.tokens = tokens
        self.prompt_length = len(tokens) if prompt_length is None else prompt_length
        self._counted = 0
        self._slots: dict[int, int] = {}  # where each distinct token is counted
        self._ids = np.zeros(256, np.int64)
        self._emitted = np.zeros(256, np.float32)

    def rollback(self, length: int) -> None:
        """Drop the tokens from ``length`` on."""
        if length < self._counted:
            self._forget()
        del self.tokens[length:]

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct tokens, and how often each was emitted.

        Returns:
            Token ids, int64 [distinct], in order of first occurrence, and their numbers of occurrences in the output,
            float32 [distinct], 0 for tokens that only the prompt has. Both are views, valid until the next call.
        """
        self._catch_up()
        return self._ids[: len(self._slots)], self._emitted[: len(self._slots)]

    def emitted(self, token: int) -> int:
        """How often the output holds ``token``."""
        return self.occurrences(token) or 0

    def occurrences(self, token: int) -> int | None:
        """How often the output holds ``token``; ``None`` if neither it nor the prompt does."""
        self._catch_up()
        slot = self._slots.get(token)
        return None if slot is None else int(self._emitted[slot])

    def _catch_up(self) -> None:
        """Count what was appended since the last time."""
        if len(self.tokens) < self._counted:
            self._forget()
        new = self.tokens[self._counted :]
        if not new:
            return
        known = len(self._slots)
        for token in new:
            self._slots.setdefault(token, len(self._slots))
        while len(self._slots) > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._emitted = np.concatenate((self._emitted, np.zeros_like(self._emitted)))
        self._ids[known : len(self._slots)] = list(islice(self._slots, known, None))
        output = new[max(self.prompt_length - self._counted, 0) :]
        np.add.at(self._emitted, [self._slots[token] for token in output], 1.0)
        self._counted += len(new)

    def _forget(self) -> None:
        self._counted = 0
        self._slots.clear()
        self._emitted.fill(0.0)


def chain_paths(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The drafted tokens that each row of a chain follows: row i follows the first i.

    Args:
        tokens: K draft tokens.

    Returns:
        K + 1 paths.
    """
    chain = tuple(tokens)
    return [chain[:row] for row in range(len(chain) + 1)]


def tree_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The drafted tokens that each row of a tree follows: row 0 none, row i + 1 the path from the root to node i.

    Args:
        tokens: K draft tokens, parents first.
        parents: K indices into them; -1 for a child of the root, that is, of the text's last token.

    Returns:
        K + 1 paths.
    """
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths
