"""A head in training: it reads the target's hidden states, and behind them its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_spec.distill.draft_folder import require_draft
from edge_spec.distill.draft_ids import choose_draft_ids
from edge_spec.distill.head import Head
from edge_spec.distill.head_files import read_head, read_head_config, write_head
from edge_spec.distill.initial_weights import head_config, initial_head, read_embedding
from edge_spec.distill.rollout import roll_out
from edge_spec.distill.student import DraftedStep, Ids
from edge_spec.distill.text_batch import TextBatch
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.errors import EdgeSpecError
from edge_spec.export.checkpoint import Checkpoint
from edge_spec.export.lm_head_rows import lm_head_rows


@dataclass
class HeadStudent:
    """Implements :class:`~edge_spec.distill.student.Student`.

    Attributes:
        network: the head.
        embedding: [vocabulary, hidden], the target's.
        lm_head: float32 [draft vocabulary, hidden], the target's rows.
        draft_ids: int64 [draft vocabulary], ascending.
        learned_steps: how many steps of its own drafting it learns from.
    """

    network: Head
    embedding: Tensor
    lm_head: Tensor
    draft_ids: Ids
    learned_steps: int = 3

    def roll_out(self, batch: TextBatch, steps: int, columns: Tensor | None = None) -> Iterator[DraftedStep]:
        """Let it read its own output from the second step on."""
        lm_head = self.lm_head if columns is None else self.lm_head[columns]
        for step in roll_out(self.network, self.embedding, batch, steps):
            yield DraftedStep(step.rows, self.network.norm(step.outputs) @ lm_head.T)

    def write(self, folder: Path) -> None:
        """Write its two files."""
        write_head(folder, self.network, self.draft_ids)


def head_to_begin_with(
    checkpoint: Checkpoint, taps: tuple[int, ...], settings: TrainSettings
) -> tuple[Head, Ids] | None:
    """The head that ``start_from`` names, with the ids that it proposes; ``None`` if it names none.

    Args:
        checkpoint: the target.
        taps: after how many of its layers the texts have its hidden states.
        settings: of the run.

    Raises:
        EdgeSpecError: it cannot be read, or is made for another target.
    """
    if settings.start_from is None:
        return None
    require_draft(settings.start_from, "head")
    found = read_head_config(settings.start_from)
    wanted = head_config(checkpoint, taps, found.draft_vocabulary_size, found.intermediate_size)
    if found != wanted:
        raise EdgeSpecError(
            f"The head in {settings.start_from} is made for another target: it has {found}, expected {wanted}."
        )
    return read_head(settings.start_from)


def begin_head(
    checkpoint: Checkpoint, taps: tuple[int, ...], shares: npt.NDArray[np.float64], settings: TrainSettings
) -> HeadStudent:
    """A head to start with.

    Args:
        checkpoint: the target.
        taps: after how many of its layers the texts have its hidden states.
        shares: float64 [vocabulary], how often the target expects each id.
        settings: of the run.

    Raises:
        EdgeSpecError: the head to go on from is made for another target.
    """
    begun = head_to_begin_with(checkpoint, taps, settings)
    if begun is None:
        ids = choose_draft_ids(shares, checkpoint.vocabulary, settings.draft_vocabulary)
        config = head_config(checkpoint, taps, len(ids), settings.intermediate_size)
        head = initial_head(checkpoint, config, settings.start, settings.seed)
    else:
        head, ids = begun
    device = settings.device
    lm_head = torch.from_numpy(lm_head_rows(checkpoint, ids)).to(device)
    return HeadStudent(head.to(device), read_embedding(checkpoint).to(device), lm_head, ids, settings.steps)
