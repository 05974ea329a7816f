"""Which ids the columns of a draft's logits stand for, where the draft proposes a part of the vocabulary only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.graph_checks.head_check import read_head_ids
from edge_spec.runtime.noise import Noise


class DraftVocabulary:
    """What a draft can propose.

    Laws and noise stay as narrow as the draft's logits wherever nobody needs them for every id: at 32,000 of 152,000
    ids that saves more time than the map costs.

    Attributes:
        size: ids there are; ``None`` where the columns are the ids.
    """

    def __init__(self, ids: NDArray[np.int64] | None = None, size: int | None = None) -> None:
        """Name the columns.

        Args:
            ids: int64 [columns], ascending, below ``size``; ``None`` where column i stands for id i.
            size: ids there are, if ``ids`` are given.
        """
        self._ids = ids
        self.size = size

    def id_of(self, column: int) -> int:
        """The id that a column stands for."""
        return column if self._ids is None else int(self._ids[column])

    def noise(self, noise: Noise, position: int, columns: int) -> NDArray[np.float32]:
        """The Gumbel noise of the columns' ids at a position, float32 [columns]."""
        if self._ids is None:
            return noise.gumbel(position, columns)
        assert self.size is not None
        return noise.gumbel_of(position, self.size, self._ids)

    def spread(self, values: NDArray[np.float32], elsewhere: float) -> NDArray[np.float32]:
        """From a value for every column, float32 [columns], one for every id, float32 [size]."""
        if self._ids is None:
            return values
        assert self.size is not None
        spread = np.full(self.size, elsewhere, np.float32)
        spread[self._ids] = values
        return spread

    def only(self, columns: NDArray[np.int64], of: int) -> DraftVocabulary:
        """What some of its columns stand for.

        Args:
            columns: int64 [n], ascending.
            of: how many columns there are.
        """
        ids = columns if self._ids is None else self._ids[columns]
        return DraftVocabulary(ids, of if self.size is None else self.size)


WHOLE = DraftVocabulary()


def read_draft_vocabulary(bundle: Bundle) -> DraftVocabulary:
    """Read what the columns of a bundle's draft stand for: ids of the target, or of the draft's own tokenizer.

    Raises:
        BundleError: the file cannot be read, or its ids are not ascending, or beyond those there are.
    """
    speech = bundle.manifest.draft_vocabulary
    if speech is None or not speech.names_columns:
        return WHOLE
    ids: NDArray[Any] = np.frombuffer(bundle.draft_ids(), "<u4").astype(np.int64)
    if len(ids) == 0 or (np.diff(ids) <= 0).any() or ids[-1] >= speech.size:
        raise BundleError(
            f"{bundle.path} says that its draft proposes ids which are not ascending and below {speech.size:,}; export "
            "it again."
        )
    return DraftVocabulary(ids, speech.size)


def read_head_vocabulary(bundle: Bundle) -> DraftVocabulary:
    """Read what the columns of a bundle's head stand for, ids of the target.

    Raises:
        BundleError: the file cannot be read, or its ids are not ascending, or beyond those there are.
    """
    head = bundle.manifest.head
    ids = None if head is None else read_head_ids(bundle, head)
    return WHOLE if ids is None else DraftVocabulary(ids, bundle.manifest.vocab_size)
