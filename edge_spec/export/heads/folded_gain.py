"""The gain of a target's final norm, taken out of a stored lm_head that it has been multiplied into."""

from __future__ import annotations

import numpy as np

from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.export.heads.target_of_bundle import TargetOfBundle

# Rows of lm_head that are compared. What rounding did to them averages out.
_ROWS = 4096
# By how much of its length a row may be off behind the gain that was found: rounding to 8 bits takes a hundredth.
_APART = 0.1


def folded_gain(target: TargetOfBundle, head: HeadTensors) -> Float32Array:
    """The gain, float32 [hidden].

    The stored rows are those of the checkpoint times the gain, so it is found by comparing them with rows that do not
    have it: the head's own copy of lm_head, or the target's embedding where lm_head is the same matrix. Failing that,
    the target's checkpoint is asked.

    Args:
        target: whose stream is rotated.
        head: tensors of a head, among which lm_head may be.

    Raises:
        CheckpointError: none of these is there.
    """
    facts = target.record.architecture
    count = min(_ROWS, target.vocab_size)
    stored = _unrotated(target, target.lm_head_rows(0, count))
    shape = facts.logits_size, facts.hidden_size
    tried: list[Float32Array] = []
    if "lm_head.weight" in head:
        tried.append(head.read_rows("lm_head.weight", 0, count, *shape))
    if facts.tied_embeddings:
        tried.append(_unrotated(target, target.embedding_rows(range(count))))
    for plain in tried:
        gain = (plain * stored).sum(axis=0) / np.maximum((plain * plain).sum(axis=0), np.finfo(np.float32).tiny)
        if np.linalg.norm(plain * gain - stored) <= _APART * np.linalg.norm(stored):
            return np.asarray(gain, np.float32)
    checkpoint = checkpoint_of(target.record, "final norm")
    return checkpoint.tensor("norm.weight") * np.float32(checkpoint.architecture.logits_scale)


def _unrotated(target: TargetOfBundle, rows: Float32Array) -> Float32Array:
    """Rows of the rotated stream as the checkpoint has them: x R times R transposed."""
    assert target.rotation is not None
    left, right, signs = target.rotation.factors
    pieces = rows.reshape(len(rows), len(left), len(right)) @ right.T
    return (left.T @ pieces).reshape(rows.shape) * signs
