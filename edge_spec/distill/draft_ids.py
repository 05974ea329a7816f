"""Which ids a draft proposes: those its target is likeliest to need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.export.checkpoint import Vocabulary

# Control tokens that are kept beside those that end a text; some vocabularies have hundreds.
_MOST_SPECIAL = 16


def choose_draft_ids(shares: npt.NDArray[np.float64], vocabulary: Vocabulary, most: int) -> npt.NDArray[np.int64]:
    """Return the ids to keep, ascending.

    Args:
        shares: float64 [vocabulary], how often the target expects each.
        vocabulary: the target's. What ends a text is kept in any case.
        most: ids to keep.

    Where the target expects none of two, the lower id is kept: tokenizers give low ids to what is frequent.
    """
    usable = min(vocabulary.size, len(shares))
    needed = [*vocabulary.eos_token_ids, *vocabulary.special_token_ids[:_MOST_SPECIAL]]
    order = np.argsort(-shares[:usable], kind="stable")
    ranked = dict.fromkeys([*(token for token in needed if token < usable), *order.tolist()])
    return np.sort(np.array(list(ranked)[:most], np.int64))
