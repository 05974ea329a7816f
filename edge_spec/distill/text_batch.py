"""Several texts, one behind the other, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_spec.distill.tapped_text import TappedText


@dataclass(frozen=True)
class Span:
    """Where one text lies in a batch.

    Attributes:
        start: its first row.
        rows: rows that a draft has for it: one for each token but the last two, which no row is followed by.
        first: the first of those rows that a rollout starts from. It reads the first token of the answer.
    """

    start: int
    rows: int
    first: int

    def rollouts(self, step: int) -> int:
        """How many rollouts come as far as ``step``, counted from 0, before the text is over."""
        return max(self.rows - self.first - step, 0)


@dataclass(frozen=True)
class TextBatch:
    """Texts of together ``n`` tokens, laid out one behind the other.

    Attributes:
        spans: where each text lies.
        token_ids: int64 [n].
        positions: int64 [n], of each token in its text.
        taps: float32 [n, taps * hidden]; no columns if nobody reads them.
        columns: int64 [n, k], the likeliest next tokens after each token as columns of the draft vocabulary; 0 for
            those it lacks.
        probabilities: float32 [n, k], theirs; 0 for those the draft vocabulary lacks.
        likeliest: int64 [n], the id of the target's likeliest next token.
    """

    spans: tuple[Span, ...]
    token_ids: Tensor
    positions: Tensor
    taps: Tensor
    columns: Tensor
    probabilities: Tensor
    likeliest: Tensor

    def starts(self, step: int) -> Tensor:
        """The rows whose rollouts come as far as ``step``: int64 [rollouts], text by text."""
        ranges = [torch.arange(s.start + s.first, s.start + s.first + s.rollouts(step)) for s in self.spans]
        return torch.cat(ranges).to(self.token_ids.device)

    def to(self, device: str) -> TextBatch:
        """Return the batch on a device."""
        return TextBatch(
            self.spans,
            self.token_ids.to(device),
            self.positions.to(device),
            self.taps.to(device),
            self.columns.to(device),
            self.probabilities.to(device),
            self.likeliest.to(device),
        )


def first_rollout(prompt_length: int) -> int:
    """The row where drafting starts: the target has read the prompt and has given the first token behind it."""
    return max(prompt_length - 1, 0)


def pack(texts: Sequence[TappedText], column_of: Tensor, most: int, with_taps: bool = True) -> TextBatch:
    """Lay texts out one behind the other.

    Args:
        texts: at least one.
        column_of: int64 [vocabulary], the column of each id in the draft vocabulary; -1 for those it lacks.
        most: tokens of a text that are taken.
        with_taps: whether somebody reads the taps.
    """
    lengths = [min(len(text.token_ids), most) for text in texts]
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    spans = tuple(
        Span(offset, max(length - 2, 0), first_rollout(text.prompt_length))
        for offset, length, text in zip(offsets, lengths, texts, strict=True)
    )

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(text, name)[:length] for text, length in zip(texts, lengths, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    top_ids = joined("top_ids", torch.int64)
    columns = column_of[top_ids]
    probabilities = joined("top_log_probs", torch.float32).exp_()
    probabilities.masked_fill_(columns < 0, 0.0)
    return TextBatch(
        spans=spans,
        token_ids=joined("token_ids", torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        taps=joined("taps", torch.float32) if with_taps else torch.empty(sum(lengths), 0),
        columns=columns.clamp_(min=0),
        probabilities=probabilities,
        likeliest=top_ids[:, 0],
    )
