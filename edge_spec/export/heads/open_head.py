"""Tells what kind of head a checkpoint is, and reads it."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.errors import UnsupportedError
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.heads.eagle3_checkpoint import is_eagle3, read_eagle3
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.mtp_checkpoint import is_mtp, read_mtp
from edge_spec.export.heads.recurrent_head import RecurrentHead
from edge_spec.manifest import Manifest


def read_head(
    folder: HeadFolder, manifest: Manifest, taps: Sequence[int] | None, final_norm: Float32Array | None = None
) -> RecurrentHead:
    """Read a head for the target of a bundle.

    Args:
        folder: the checkpoint.
        manifest: of the bundle.
        taps: behind how many layers it reads the target, in the order of its weights; ``None`` for what it says.
        final_norm: gain [D] of the target's final norm, if the bundle has it.

    Raises:
        CheckpointError: something is missing, damaged or does not fit the target.
        UnsupportedError: the head is of a kind that is not built.
    """
    if is_eagle3(folder.config, folder.tensors):
        return read_eagle3(folder, manifest, taps)
    if is_mtp(folder.tensors, manifest.target.architecture.layers):
        return read_mtp(folder, manifest, taps, final_norm)
    raise UnsupportedError(
        f"{folder.config.where}: this is no head that is supported: neither its configuration nor the names of its "
        "tensors are those of EAGLE-3, or of a multi-token prediction layer of the target"
    )
