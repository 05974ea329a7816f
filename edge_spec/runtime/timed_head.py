"""A head whose calls are to be timed, with inputs that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.head_model import HEAD_ROWS, HeadModel
from edge_spec.runtime.kv_cache import KVCache


class TimedHead:
    """Calls of a head by numbers of rows: one row is a step on its own feature, more are read as the target's."""

    chain_lengths: tuple[int, ...] = ()

    def __init__(self, head: HeadModel) -> None:
        """Time the calls of ``head``."""
        self._head = head
        self._taps = np.full((HEAD_ROWS, head.width), 0.1, np.float32)
        self._features = np.full((1, head.hidden), 0.1, np.float32)

    @property
    def cache(self) -> KVCache:
        """That of the head's current text."""
        return self._head.cache

    @property
    def context(self) -> int:
        """Most rows of a text."""
        return self._head.context

    def forward(self, token_ids: Sequence[int], logit_rows: Sequence[int]) -> NDArray[np.float32]:
        """Append rows to the cache and return the logits of chosen ones."""
        if len(token_ids) == 1:
            return self._head.forward(token_ids, logit_rows, features=self._features)[0]
        return self._head.forward(token_ids, logit_rows, taps=self._taps[: len(token_ids)])[0]

    def draft(self, token_ids: Sequence[int], steps: int) -> DraftedChain:
        """It never drafts several tokens in a call."""
        raise NotImplementedError
