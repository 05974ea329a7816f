"""The target's laws for the rows of one call, computed when a rule first looks at them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.logit_rows import top_of
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.top_law import law_of_top
from edge_spec.runtime.verification.rule import Laws


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
        self._laws: dict[int, NDArray[np.float32]] = {}

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """Return the law of the token that follows ``row``, float32 [vocab]. Raises LogitsError if there is none."""
        if row not in self._laws:
            top = top_of(self._rows, row)
            law = None if top is None else law_of_top(top, self._columns, self._sampling)
            self._laws[row] = self._whole(row) if law is None else law
        return self._laws[row]

    def _whole(self, row: int) -> NDArray[np.float32]:
        logits = self._rows[row]
        try:
            law: NDArray[np.float32] = probabilities(logits[None], self._sampling)[0]
        except LogitsError as error:  # which knows of one row only
            raise LogitsError(error.problem, row) from None
        return law
