"""The columns that a batch learns from, in place of the whole draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tapped_texts import TOP, random_text

from edge_spec.distill.column_sample import ColumnSample, sample_columns
from edge_spec.distill.draft_loss import draft_losses
from edge_spec.distill.text_batch import TextBatch, pack

VOCABULARY = 40
# Draft columns of the ids 10 to 39; the ids below are not in the draft vocabulary.
COLUMN_OF = torch.cat([torch.full((10,), -1), torch.arange(30)])
LOGITS = torch.randn(9, 30, generator=torch.Generator().manual_seed(3))


def batch_of(seed: int = 0) -> TextBatch:
    return pack([random_text(seed, 7, 2), random_text(seed + 1, 9, 4)], COLUMN_OF, 64)


def sampled(batch: TextBatch, expected: int, negatives: int, seed: int = 0) -> ColumnSample:
    return sample_columns(batch, 30, expected, negatives, np.random.default_rng(seed))


def losses(sample: ColumnSample, logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy and overlap of all rows that count."""
    rows = sample.batch.starts(0) + 1
    given = logits[:, sample.columns] + sample.offsets
    return torch.stack(draft_losses(given, sample.batch.columns[rows], sample.batch.probabilities[rows]))


def test_a_sample_of_everything_gives_the_loss_of_the_whole_draft_vocabulary() -> None:
    batch = batch_of()
    rows = batch.starts(0) + 1
    logits = LOGITS[: len(rows)]
    sample = sampled(batch, TOP, 30)
    assert sorted(sample.columns.tolist()) == list(range(30))
    whole = torch.stack(draft_losses(logits, batch.columns[rows], batch.probabilities[rows]))
    torch.testing.assert_close(losses(sample, logits), whole)


def test_what_a_row_expects_is_in_the_sample_with_its_probability_and_the_rest_is_not_there_twice() -> None:
    batch = batch_of(4)
    sample = sampled(batch, 2, 3)
    assert len(set(sample.columns.tolist())) == len(sample.columns)
    rows = batch.starts(0) + 1
    expected = {
        int(column)
        for row in rows
        for column, share in zip(batch.columns[row, :2], batch.probabilities[row, :2], strict=True)
        if share > 0
    }
    assert sample.columns[:-3].tolist() == sorted(expected)
    # The ids that are in the sample only by lot stand for others, so no row learns to expect them.
    for row in rows:
        for at in range(TOP):
            was = int(batch.columns[row, at])
            share = float(batch.probabilities[row, at])
            assert float(sample.batch.probabilities[row, at]) == (share if was in expected else 0)
            if was in expected:
                assert int(sample.columns[sample.batch.columns[row, at]]) == was
    others = 30 - len(expected)
    assert sample.offsets.tolist() == pytest.approx([0.0] * len(expected) + [np.log(others / 3)] * 3)


def test_on_average_a_sample_has_the_sum_of_the_whole_draft_vocabulary() -> None:
    batch = batch_of(7)
    sums = []
    for seed in range(2000):
        sample = sampled(batch, 2, 3, seed)
        sums.append((LOGITS[0, sample.columns] + sample.offsets).exp().sum())
    found = torch.stack(sums)
    expected = LOGITS[0].exp().sum()
    assert abs(found.mean() - expected) < 4 * found.std() / len(sums) ** 0.5
    assert found.std() > 0


def test_each_step_draws_others_and_one_seed_the_same() -> None:
    batch = batch_of(2)
    first, again, other = (sampled(batch, 2, 5, seed).columns.tolist() for seed in (1, 1, 2))
    assert first == again != other
