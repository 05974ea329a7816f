"""Random texts with what a target would have computed on the way."""

from __future__ import annotations

import numpy as np

from edge_spec.distill.tapped_text import TappedText

# Likeliest tokens of each row.
TOP = 8


def random_text(seed: int, length: int, prompt: int, width: int = 32, vocabulary: int = 40) -> TappedText:
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(vocabulary, 0.1), length)
    top = np.argsort(-shares, axis=1)[:, :TOP]
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.take_along_axis(shares, top, 1)).astype(np.float16)
    log_probs[: max(prompt - 1, 0)] = 0
    return TappedText(
        generator.integers(0, vocabulary, length).astype(np.int32),
        prompt,
        generator.standard_normal((length, width)).astype(np.float16),
        top.astype(np.int32),
        log_probs,
    )
