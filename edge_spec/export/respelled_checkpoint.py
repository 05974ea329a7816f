"""A draft's checkpoint with other rows in its embedding and lm_head: what it reads and proposes, renumbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Checkpoint, Vocabulary

Float32Array = npt.NDArray[np.float32]

# Rows between two wanted ones that are read along rather than skipped.
_LARGEST_SKIP = 64


class RespelledCheckpoint:
    """Passes on a checkpoint, but for the rows of its embedding and its lm_head.

    lm_head is never tied: it has other rows than the embedding.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary,
        columns: npt.NDArray[np.int64],
        pieces: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Choose the rows.

        Args:
            checkpoint: whose weights they are.
            vocabulary: of the ids that the model then reads.
            columns: int64 [logits], the row of lm_head for each column of the logits.
            pieces: for each id that is read, the rows of the embedding whose mean it gets, zero if there are none;
                ``None`` for the embedding as it is.
        """
        self._checkpoint = checkpoint
        self._columns = columns
        self._pieces = pieces
        facts = checkpoint.architecture
        self.source = checkpoint.source
        self.architecture: Architecture = replace(
            facts,
            logits_size=len(columns),
            embedding_rows=facts.logits_size if pieces is None else len(pieces),
            tied_embeddings=False,
        )
        self.default_sampling: Mapping[str, float] = checkpoint.default_sampling
        # Whoever compares logits compares all columns: none of them is padding.
        self.vocabulary = replace(vocabulary, size=len(columns))

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor that has no row for each id."""
        return self._checkpoint.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32."""
        if name == "lm_head.weight":
            tied = self._checkpoint.architecture.tied_embeddings
            return self._gather("embed_tokens.weight" if tied else name, self._columns[start:stop])
        if name != "embed_tokens.weight" or self._pieces is None:
            return self._checkpoint.rows(name, start, stop)
        pieces = self._pieces[start:stop]
        counts = np.array([len(each) for each in pieces])
        found = self._gather(name, np.array([piece for each in pieces for piece in each], np.int64))
        rows = np.zeros((len(pieces), found.shape[1]), np.float32)
        np.add.at(rows, np.repeat(np.arange(len(pieces)), counts), found)
        rows /= np.maximum(counts, 1)[:, None]
        return rows

    def sha256(self) -> str:
        """Return a hex digest that identifies the weights it takes rows of."""
        return self._checkpoint.sha256()

    def _gather(self, name: str, wanted: npt.NDArray[np.int64]) -> Float32Array:
        """Rows in the order they are wanted in."""
        gathered = np.empty((len(wanted), self._checkpoint.architecture.hidden_size), np.float32)
        order = np.argsort(wanted, kind="stable")
        gaps = np.flatnonzero(np.diff(wanted[order]) > _LARGEST_SKIP) + 1
        for run in np.split(order, gaps):
            if len(run):
                first, last = int(wanted[run[0]]), int(wanted[run[-1]])
                gathered[run] = self._checkpoint.rows(name, first, last + 1)[wanted[run] - first]
        return gathered
