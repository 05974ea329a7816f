"""A head that fills a block at once whose calls are to be timed and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.tap_rows import TapRows

# Rows of hidden states in a timed call, at most.
_MOST_ROWS = 64
# Of so many tokens of a text one is guessed: a whole block is computed for it.
_GUESSED = 4


class TimedBlock:
    """Calls of a head by how many hidden states they read, with inputs that mean nothing.

    Attributes:
        cache: one of its own.
    """

    chain_lengths: tuple[int, ...] = ()

    def __init__(self, head: BlockHead) -> None:
        """Time the calls of ``head``."""
        self.cache: KVCache = head.new_cache()
        self._head = head
        self._taps = np.full((_MOST_ROWS, head.width), 0.1, np.float32)

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        return self._head.context

    def forward(self, token_ids: Sequence[int], logit_rows: Sequence[int]) -> NDArray[np.float32]:
        """Read as many hidden states and draft a whole block; its rows are the logits that are returned."""
        past = self.cache.length
        return self._head.draft(self.cache, self._taps[: len(token_ids)], past, 0, self._head.tokens)[0]

    def draft(self, token_ids: Sequence[int], steps: int) -> DraftedChain:
        """A call is one step, however many tokens it drafts."""
        raise NotImplementedError


def guesses(head: BlockHead, text: Sequence[int], taps: TapRows, start: int) -> Iterator[tuple[float, bool]]:
    """What the head says of the next token in some places of a text, and whether it is right.

    Args:
        head: the head.
        text: the text.
        taps: the target's hidden states of all its tokens but the last.
        start: the first place to be guessed.

    Yields:
        What speaks for the likeliest token, its probability or the head's confidence; and whether it is the text's.
    """
    cache, read = head.new_cache(), 0
    for place in range(max(start, 2), len(text), _GUESSED):
        rows, before = taps.read(read, place - 1), text[place - 1]
        logits, scores = head.draft(cache, rows, read, before, 1)
        read = place - 1
        columns, row = (None, logits[0]) if head.markov is None else head.markov.biased(logits[0], before)
        best = int(np.argmax(row))
        share = 1.0 / float(np.exp(row - row[best]).sum())
        if scores is not None:
            added = 0.0 if head.markov is None else head.markov.confidence(before)
            share = 0.5 * (1.0 + math.tanh(0.5 * (float(scores[0]) + added)))
        if math.isfinite(share):
            yield share, (best if columns is None else int(columns[best])) == text[place]
