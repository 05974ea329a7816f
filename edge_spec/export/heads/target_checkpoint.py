"""The checkpoint that a bundle's target was made of, for heads that need what the bundle has in other weights."""

from __future__ import annotations

from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.checkpoint import Checkpoint, open_checkpoint
from edge_spec.manifest import ModelRecord


def checkpoint_of(target: ModelRecord, needed: str) -> Checkpoint:
    """Open it again.

    Args:
        target: as the bundle has it.
        needed: what of it the head needs, for messages.

    Raises:
        CheckpointError: it is gone, or not what it was.
    """
    try:
        checkpoint = open_checkpoint(target.source)
        same = checkpoint.sha256() == target.source_sha256
    except EdgeSpecError as error:
        raise CheckpointError(
            f"the head needs the {needed} of its target, which this bundle was made of {target.source!r}: {error} "
            "If it has moved, say where it is (--target)."
        ) from error
    if not same:
        raise CheckpointError(
            f"the head needs the {needed} of its target, but {target.source!r} is not what this bundle was made of; "
            "say where that is (--target), or export the target again"
        )
    return checkpoint
