"""The target's laws for the rows of one call, computed when a rule first looks at them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.verification.rule import Laws


class TargetLaws:
    """Rows of probabilities over rows of processed logits.

    A rule that stops at the first rejection pays for no law behind it. An error in a row that plain decoding would
    never have met stays unseen for the same reason.
    """

    def __init__(self, rows: Laws, sampling: SamplingParams) -> None:
        self._rows = rows
        self._sampling = sampling
        self._laws: dict[int, NDArray[np.float32]] = {}

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """Return the law of the token that follows ``row``, float32 [vocab]. Raises LogitsError if there is none."""
        if row not in self._laws:
            logits = self._rows[row]
            try:
                self._laws[row] = probabilities(logits[None], self._sampling)[0]
            except LogitsError as error:  # which knows of one row only
                raise LogitsError(error.problem, row) from None
        return self._laws[row]
