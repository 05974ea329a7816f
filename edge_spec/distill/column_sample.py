"""Some columns of the draft vocabulary in place of all (sampled softmax, Jean et al. 2015, section 3).

A row's probabilities need the sum of exp(logit) over the draft vocabulary. For a small target that means more than half
of all the arithmetic, most of it for ids that no row of a batch expects. So a batch has the columns that some row
expects, and of all others a few, each of which stands for as many as were left out:

    sum over all of exp(l) ~ sum over expected of exp(l) + others / drawn * sum over drawn of exp(l),

of which the right side is the left one on average over the draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from edge_spec.distill.text_batch import TextBatch


@dataclass(frozen=True)
class ColumnSample:
    """The columns that a batch learns from.

    Attributes:
        batch: the texts, whose ``columns`` count within the sample, with a probability of 0 for what it lacks.
        columns: int64 [sample], which they are in the draft vocabulary.
        offsets: float32 [sample], to be added to the logits, so that the drawn ones stand for all others.
    """

    batch: TextBatch
    columns: Tensor
    offsets: Tensor


def sample_columns(
    batch: TextBatch, vocabulary: int, expected_tokens: int, negative_samples: int, dice: np.random.Generator
) -> ColumnSample:
    """Choose the columns for a batch.

    Args:
        batch: the texts.
        vocabulary: size of the draft vocabulary.
        expected_tokens: of each row's likeliest tokens, how many are in the sample for sure.
        negative_samples: columns that are drawn from all others, or all of them if there are no more.
        dice: draws them.
    """
    rows = batch.starts(0) + 1  # the later steps of rollouts are compared with some of the same
    likeliest, probabilities = batch.columns[rows, :expected_tokens], batch.probabilities[rows, :expected_tokens]
    device = batch.columns.device
    is_expected = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    is_expected[likeliest[probabilities > 0]] = True
    expected, others = is_expected.nonzero()[:, 0], (~is_expected).nonzero()[:, 0]
    drawn = others
    if len(others) > negative_samples:
        drawn = others[torch.from_numpy(dice.choice(len(others), negative_samples, replace=False)).to(device)]
    columns = torch.cat([expected, drawn])
    offsets = torch.zeros(len(columns), device=device)
    if len(drawn):
        offsets[len(expected) :] = math.log(len(others) / len(drawn))
    places = torch.zeros(vocabulary, dtype=torch.int64, device=device)
    places[expected] = torch.arange(len(expected), device=device)
    sampled = replace(
        batch,
        columns=places[batch.columns],
        probabilities=batch.probabilities.where(is_expected[batch.columns], 0.0),
    )
    return ColumnSample(sampled, columns, offsets)
