"""Weights as they are written: float16."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from edge_spec.errors import EdgeSpecError


def half_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as float16 on the CPU.

    Raises:
        EdgeSpecError: one of them is beyond float16, or not a number: training has failed.
    """
    halves = {name: value.detach().cpu().half().contiguous() for name, value in tensors.items()}
    for name, value in halves.items():
        if not value.isfinite().all():
            raise EdgeSpecError(
                f"Training has failed: {name} holds values that cannot be written. Begin another run with a lower "
                "learning rate (--learning-rate)."
            )
    return halves
