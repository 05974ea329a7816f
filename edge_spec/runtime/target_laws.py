"""The target's laws for the rows of one call, computed when a rule first looks at them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.logit_rows import top_of
from edge_spec.runtime.noise import sample_gumbel
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.top_law import law_of_top
from edge_spec.runtime.top_sample import PlaceNoise, token_of_top
from edge_spec.runtime.verification.rule import Laws, SparseChance

_Few = tuple[NDArray[np.int64], NDArray[np.float32]]


class TargetLaws:
    """Rows of probabilities over rows of processed logits.

    A rule that stops at the first rejection pays for no law behind it. An error in a row that plain decoding would
    never have met stays unseen for the same reason.
    """

    def __init__(self, rows: Laws, columns: int, sampling: SamplingParams) -> None:
        """Take the laws of rows of ``columns`` processed logits, which may know their likeliest tokens (``top``)."""
        self._rows = rows
        self._columns = columns
        self._sampling = sampling
        self._truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self._laws: dict[int, NDArray[np.float32]] = {}
        self._few: dict[int, _Few | None] = {}

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """Return the law of the token that follows ``row``, float32 [vocab]. Raises LogitsError if there is none."""
        if row not in self._laws:
            few = self._of_top(row)
            if few is None:
                self._laws[row] = self._of_whole_row(row)
            else:
                self._laws[row] = np.zeros(self._columns, np.float32)
                self._laws[row][few[0]] = few[1]
        return self._laws[row]

    def token(self, row: int, depth: int, chance: SparseChance) -> int | None:
        """The token that the coupled rule chooses, where that takes the noise of a few tokens only; else ``None``.

        Args:
            row: the token follows it.
            depth: how many tokens of the round come before it.
            chance: gives the noise.
        """
        columns = self._columns
        if self._truncates:
            ids, law = self._kept(row)
            return int(ids[sample_gumbel(law, chance.gumbel_of(depth, columns, ids))])
        top = top_of(self._rows, row)
        if top is None:
            return None
        noise = PlaceNoise(
            lambda ids: chance.gumbel_of(depth, columns, ids), lambda least: chance.louder(depth, columns, least)
        )
        return token_of_top(top, columns, self._sampling.temperature, noise, lambda: self._rows[row])

    def _kept(self, row: int) -> _Few:
        """The tokens that a truncated law leaves possible, and maybe some more, and their probabilities."""
        few = self._of_top(row)
        if few is None:
            law = self[row]
            ids = np.flatnonzero(law > 0.0)
            few = self._few[row] = ids, law[ids]
        return few

    def _of_top(self, row: int) -> _Few | None:
        if row not in self._few:
            top = top_of(self._rows, row)
            self._few[row] = None if top is None else law_of_top(top, self._columns, self._sampling)
        return self._few[row]

    def _of_whole_row(self, row: int) -> NDArray[np.float32]:
        logits = self._rows[row]
        try:
            law: NDArray[np.float32] = probabilities(logits[None], self._sampling)[0]
        except LogitsError as error:  # which knows of one row only
            raise LogitsError(error.problem, row) from None
        return law
