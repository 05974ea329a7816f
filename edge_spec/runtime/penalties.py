"""Repetition, presence and frequency penalties on a row's own history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.history import History
from edge_spec.runtime.sampling_params import SamplingParams


def penalize(logits: NDArray[np.float32], history: History, path: Sequence[int], params: SamplingParams) -> None:
    """Lower the logits of tokens that have occurred, in place.

    The repetition penalty (Keskar et al. 2019, "CTRL", with the sign rule of transformers) looks at prompt and output;
    presence and frequency penalties (OpenAI's API) at the output alone. A drafted token counts as output for the rows
    behind it.

    All rows of a block share the counts of their common history; only the tokens of the row's own path are counted
    here. Both ways do the same float32 operations in the same order, so a row has the same bits whether its path is
    drafted or already emitted.

    Args:
        logits: float32 [vocab].
        history: the text that the block follows.
        path: drafted tokens that the row follows beyond it.
        params: the penalties.
    """
    drafted = Counter(path)
    tokens = np.array(list(drafted), np.int64)
    counts = np.array([history.emitted(token) + count for token, count in drafted.items()], np.float32)
    on_path = _penalized(logits[tokens], counts, params)
    ids, emitted = history.counts()
    logits[ids] = _penalized(logits[ids], emitted, params)
    logits[tokens] = on_path


def penalize_known(
    ids: NDArray[np.int64], logits: NDArray[np.float32], history: History, path: Sequence[int], params: SamplingParams
) -> None:
    """The same for some tokens of a row, and to the same bits, in place.

    Args:
        ids: int64 [n], which tokens.
        logits: float32 [n], theirs.
        history: as for :func:`penalize`.
        path: likewise.
        params: likewise.
    """
    drafted = Counter(path)
    places: list[int] = []
    counts: list[int] = []
    for place, token in enumerate(ids.tolist()):
        emitted = history.occurrences(token)
        if emitted is not None or token in drafted:
            places.append(place)
            counts.append((emitted or 0) + drafted[token])
    if places:
        logits[places] = _penalized(logits[places], np.array(counts, np.float32), params)


def _penalized(
    values: NDArray[np.float32], emitted: NDArray[np.float32], params: SamplingParams
) -> NDArray[np.float32]:
    """Penalize the logits of n tokens that have occurred.

    Args:
        values: float32 [n].
        emitted: float32 [n], occurrences in the output.
        params: the penalties.
    """
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / factor, values * factor)
    if params.frequency_penalty:
        values = values - np.float32(params.frequency_penalty) * emitted
    if params.presence_penalty:
        values = values - np.float32(params.presence_penalty) * (emitted > 0).astype(np.float32)
    return values
