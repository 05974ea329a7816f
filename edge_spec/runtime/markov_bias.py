"""A low-rank bias on the logits of a token by the token before it, from a table that lies in the bundle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_spec.bundle import Bundle
from edge_spec.manifest import HEAD_MARKOV, HeadRecord

# In nats: a token whose logit lies further below the largest one is not looked at, though a bias might favour it. The
# table has a row for every token of the vocabulary, and only rows of likely ones are read.
REACH = 16.0


class MarkovBias:
    """The bias of column c behind token t is ``after[c] @ before[t]``.

    Nothing of the table is in memory but what is read of it, and what the system keeps of the file.
    """

    def __init__(
        self, before: NDArray[np.float16], after: NDArray[np.float16], confidence: NDArray[np.float16]
    ) -> None:
        """Take the tables.

        Args:
            before: float16 [ids, rank], of the token before.
            after: float16 [columns, rank], of the token to come.
            confidence: float16 [rank], what the token before adds to the score of confidence.
        """
        self._before = before
        self._after = after
        self._confidence = confidence.astype(np.float32)

    @classmethod
    def of_bundle(cls, bundle: Bundle, record: HeadRecord) -> MarkovBias:
        """Map the table of a bundle's head, whose size the manifest has been checked for."""
        size, rank = record.model.architecture.logits_size, record.markov_rank
        table = np.memmap(bundle.path / HEAD_MARKOV, "<f2", "r", shape=(2 * size + 1, rank))
        return cls(table[:size], table[size : 2 * size], np.array(table[-1]))

    def biased(self, logits: NDArray[np.float32], token: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The columns that are likely behind a token.

        Args:
            logits: float32 [columns], without the bias.
            token: the one before.

        Returns:
            int64 [n], ascending, one at least; and their logits with the bias, float32 [n], which hold a NaN if those
            that were given do.
        """
        columns = np.flatnonzero(logits >= logits.max() - REACH)
        if not len(columns):  # the largest is no number, and so nothing is likely
            columns = np.array([logits.argmax()])
        state = self._before[token].astype(np.float32)
        return columns, logits[columns] + self._after[columns].astype(np.float32) @ state

    def confidence(self, token: int) -> float:
        """What the token before adds to the score of confidence."""
        return float(self._before[token].astype(np.float32) @ self._confidence)
