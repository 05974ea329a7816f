"""What is trained: a network, and how it drafts. What a kind of draft has of its own is behind this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from edge_spec.distill.text_batch import TextBatch

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftedStep:
    """One step of all rollouts that come as far.

    Attributes:
        rows: int64 [rollouts], the rows of the batch that tell what is right: they hold what follows the token that the
            step has read last.
        logits: [rollouts, draft vocabulary], or of some columns of it; float32, or under autocast what that gives.
    """

    rows: Tensor
    logits: Tensor


class Student(Protocol):
    """A draft in training."""

    @property
    def network(self) -> nn.Module:
        """Whose parameters are learnt and saved; what is the target's lies outside."""
        ...

    @property
    def draft_ids(self) -> Ids:
        """The id of each column of the logits, int64 [draft vocabulary], ascending."""
        ...

    @property
    def learned_steps(self) -> int:
        """How many steps of a rollout it learns from."""
        ...

    def roll_out(self, batch: TextBatch, steps: int, columns: Tensor | None = None) -> Iterator[DraftedStep]:
        """Draft from every row of the answers at once, each reading the text's own tokens.

        Args:
            batch: the texts.
            steps: how many steps at most; there are fewer if all texts are shorter.
            columns: int64, of which columns of the draft vocabulary to give logits; ``None`` for all.
        """
        ...

    def write(self, folder: Path) -> None:
        """Write the draft into a folder that exists, in place of an earlier one."""
        ...
