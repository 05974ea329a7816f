"""How well a student drafts texts that it does not learn from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from edge_spec.distill.draft_loss import draft_losses
from edge_spec.distill.student import Student
from edge_spec.distill.text_batch import TextBatch

MEASURED_STEPS = 4


@dataclass(frozen=True)
class Acceptance:
    """What was measured on held-out texts.

    Attributes:
        by_position: of the drafts whose earlier tokens were all right, the share whose token at this position is the
            target's likeliest too; for the positions 1 to 4.
        accepted_length: how many of four drafted tokens are right up to the first wrong one, on average.
        overlap: sum of min(p, q) of the two distributions at the first position, on average: the share of drafted
            tokens that would be accepted at temperature 1.
        rollouts: drafts that were measured.
    """

    by_position: tuple[float, ...]
    accepted_length: float
    overlap: float
    rollouts: int


def measure_acceptance(student: Student, batches: Iterable[TextBatch], steps: int = MEASURED_STEPS) -> Acceptance:
    """Draft from every row of the answers and compare with the target's likeliest tokens.

    A text may have been sampled. Where it does not go on with the target's likeliest token, what follows does not tell
    about greedy drafts, so those are counted up to there only. So the tokens that a draft which counts has read, which
    are the text's, are its own.

    Args:
        student: drafts.
        batches: the texts.
        steps: tokens to draft.
    """
    tried, right = [0] * steps, [0] * steps
    overlap, rollouts = 0.0, 0
    draft_ids = torch.from_numpy(student.draft_ids)
    with torch.inference_mode():
        for batch in batches:
            alive = torch.ones(len(batch.starts(0)), dtype=torch.bool, device=batch.token_ids.device)
            rows = batch.starts(0) + 1
            for step, drafted in enumerate(student.roll_out(batch, steps)):
                # Rollouts that came to the end of their text are gone.
                alive, rows = alive[torch.isin(rows + min(step, 1), drafted.rows)], drafted.rows
                likeliest = batch.likeliest[drafted.rows]
                agrees = draft_ids.to(likeliest.device)[drafted.logits.argmax(1)] == likeliest
                tried[step] += int(alive.sum())
                alive &= agrees
                right[step] += int(alive.sum())
                alive &= batch.token_ids[drafted.rows + 1] == likeliest
                if not step:
                    columns, probabilities = batch.columns[drafted.rows], batch.probabilities[drafted.rows]
                    overlap += float(draft_losses(drafted.logits, columns, probabilities)[1].sum())
                    rollouts += len(likeliest)
    by_position = tuple(hits / max(tries, 1) for hits, tries in zip(right, tried, strict=True))
    length, reached = 0.0, 1.0
    for rate in by_position:
        reached *= rate
        length += reached
    return Acceptance(by_position, length, overlap / max(rollouts, 1), rollouts)
