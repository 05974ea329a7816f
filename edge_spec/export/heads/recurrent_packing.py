"""A recurrent head in its storage format, beside a target whose embedding and lm_head it may share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Float32Array, require_finite
from edge_spec.export.heads.recurrent_conditioning import reading_rotated_embedding, with_rotated_stream
from edge_spec.export.heads.recurrent_head import OwnEmbedding, RecurrentHead
from edge_spec.export.heads.target_of_bundle import TargetOfBundle
from edge_spec.export.packing import PackedEmbedding, PackedLayer, PackedMatrix, Packer
from edge_spec.export.recipe import MatrixFormat, Recipe
from edge_spec.export.rope import Rope, rotary_tables
from edge_spec.export.rotation import Rotation

# Rows of an embedding that are compared, and how far they may be apart, relative to how large they are. Two different
# ones are farther apart than each is long; rounding to 4 bits moves them by an eighth.
_COMPARED_ROWS = 64
_SAME = 0.4


@dataclass(frozen=True)
class PackedHead:
    """A head as stored, with the attributes of :class:`RecurrentHead` but for the following.

    Attributes:
        rotary: cos and sin, compute type [context + 1, elements rotated / 2].
        shared_norm: gain of the norm before an lm_head that is the rotated target's; ``None`` elsewhere.
        rotation: of what that norm gives; ``None`` elsewhere.
    """

    embedding: PackedEmbedding
    rotary: Mapping[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]
    tap_norm: ir.TensorProtocol | None
    fuse: PackedMatrix | None
    embedding_norm: ir.TensorProtocol
    hidden_norm: ir.TensorProtocol
    join: PackedMatrix | None
    layer: PackedLayer
    reads_pairs: bool
    normed_residual: bool
    final_norm: ir.TensorProtocol
    normed_feature: bool
    lm_head: PackedMatrix
    hidden_rotation: Rotation | None = None
    shared_norm: ir.TensorProtocol | None = None
    rotation: Rotation | None = None


def pack_head(head: RecurrentHead, target: TargetOfBundle, packer: Packer, recipe: Recipe) -> PackedHead:
    """Store a head, sharing of the target what is the same.

    Args:
        head: in float32.
        target: it stands beside.
        packer: of the head's own weight file.
        recipe: formats of the head's layer classes.

    Raises:
        CheckpointError: the head's embedding lacks ids.
        UnsupportedError: the head shares what this target cannot share.
    """
    own = head.embedding
    if own is not None and own.rows < target.vocab_size:
        raise CheckpointError(
            f"{head.source}: the embedding has {own.rows} rows, but the target has {target.vocab_size} ids; is it a "
            "head for this target?"
        )
    if own is not None and not _is_the_targets(own, target):
        embedding = packer.embedding((own.rows, head.architecture.hidden_size), own.read, None)
    else:
        embedding = target.embedding()
        head = head if target.rotation is None else reading_rotated_embedding(head, target.rotation)
    head = with_rotated_stream(head, recipe)
    layer = packer.layer(0, head.layer.weights)
    # A target's hidden states have channels far larger than the others, which spoil any rounding of their rows.
    exact: MatrixFormat = "fp32" if target.device == "cpu" and recipe.attention != "fp16" else "fp16"

    def matrix(name: str, weight: Float32Array | None, storage: MatrixFormat) -> PackedMatrix | None:
        if weight is None:
            return None
        return packer.matrix(name, weight.shape, lambda start, stop: weight[start:stop], storage)

    packed = PackedHead(
        embedding=embedding,
        rotary=_rotary(head, target, packer),
        tap_norm=None if head.tap_norm is None else packer.vector("tap_norm", head.tap_norm),
        fuse=matrix("fuse", head.fuse, exact),
        embedding_norm=packer.vector("embedding_norm", head.embedding_norm),
        hidden_norm=layer.input_norm if head.layer.reads_pairs else packer.vector("hidden_norm", head.hidden_norm),
        join=matrix("join", head.join, recipe.attention),
        layer=layer,
        reads_pairs=head.layer.reads_pairs,
        normed_residual=head.layer.normed_residual,
        final_norm=packer.vector("final_norm", head.final_norm),
        normed_feature=head.normed_feature,
        lm_head=target.lm_head() if head.lm_head is None else _own_lm_head(head.lm_head, packer),
        hidden_rotation=head.hidden_rotation,
    )
    if head.lm_head is not None or target.rotation is None:
        return packed
    return replace(packed, shared_norm=_shared_norm(head, packer), rotation=target.rotation)


def _own_lm_head(weight: Float32Array, packer: Packer) -> PackedMatrix:
    return packer.lm_head((weight.shape[0], weight.shape[1]), lambda start, stop: weight[start:stop])


def _is_the_targets(own: OwnEmbedding, target: TargetOfBundle) -> bool:
    """Whether an embedding is the target's, as far as some of its rows tell."""
    ids = np.linspace(0, target.vocab_size - 1, min(_COMPARED_ROWS, target.vocab_size)).astype(int)
    rows = np.concatenate([own.read(int(token), int(token) + 1) for token in ids])
    if target.rotation is not None:
        rows = target.rotation.rows(rows)
    apart = np.linalg.norm(target.embedding_rows(ids.tolist()) - rows)
    return bool(apart <= _SAME * np.linalg.norm(rows))


def _rotary(
    head: RecurrentHead, target: TargetOfBundle, packer: Packer
) -> dict[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]:
    """Store the tables of the rotary embedding, unless the target's are the same."""
    (rope,) = head.architecture.ropes
    tables = rotary_tables(rope, head.architecture.context_length + 1)
    cos, sin = (require_finite(table, "rotary table", head.source) for table in tables)
    shared = target.vector("rotary_cos", cos), target.vector("rotary_sin", sin)
    if shared[0] is not None and shared[1] is not None:
        return {rope: (shared[0], shared[1])}
    return {rope: (packer.vector("head_rotary_cos", cos), packer.vector("head_rotary_sin", sin))}


def _shared_norm(head: RecurrentHead, packer: Packer) -> ir.TensorProtocol:
    """The gain before an lm_head which the gain of the target's final norm is part of already."""
    gain = head.tap_norm
    if gain is None or not (np.abs(gain) > np.abs(gain).max() * 1e-4).all():
        raise UnsupportedError(
            f"{head.source}: the head shares the target's lm_head, which is stored with the gains of the target's "
            "final norm in it, and some of those are too small to be taken out; export the target by recipe int4, fp16 "
            "or fp32"
        )
    return packer.vector("shared_norm", head.final_norm / gain)
