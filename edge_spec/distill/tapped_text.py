"""One text that a target wrote, with what it computed while it wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Likeliest tokens kept of each row.
TOP_TOKENS = 64


@dataclass(frozen=True)
class TappedText:
    """A prompt and the target's answer to it.

    Attributes:
        token_ids: int32 [n], the prompt as the chat template renders it and the answer, with the end token if one was
            written.
        prompt_length: tokens of the prompt.
        taps: float16 [n, taps * D], row t the hidden states at token t, one tap after the other, in the checkpoint's
            own basis.
        top_ids: int32 [n, 64], row t the likeliest tokens after token t, the likeliest first; fewer columns where the
            vocabulary has fewer ids. Rows before ``prompt_length - 1`` are zero: nobody trains on them.
        top_log_probs: float16 [n, 64], their log-probabilities at temperature 1 among all ids of the vocabulary, zero
            where ``top_ids`` is.
    """

    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    taps: npt.NDArray[np.float16]
    top_ids: npt.NDArray[np.int32]
    top_log_probs: npt.NDArray[np.float16]

    @property
    def answer_length(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.prompt_length

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays, in the order in which they are stored."""
        return self.token_ids, self.top_ids, self.top_log_probs, self.taps
