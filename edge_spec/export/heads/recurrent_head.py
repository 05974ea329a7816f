"""A head that drafts one token after another, in float32: one decoder layer over the target's hidden states.

A row is the pair of a hidden state, of token p, and the embedding of token p + 1. It tells what token p + 2 may be, and
gives the feature that takes the hidden state's place where the target has not read token p + 1 yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.packing import ReadRows
from edge_spec.export.rotation import Rotation
from edge_spec.manifest import HeadKind


@dataclass(frozen=True)
class HeadLayer:
    """The one layer; matrices are float32 [out, in], vectors float32 [out], as in :class:`DecoderLayer`.

    Attributes:
        reads_pairs: whether attention projects normed embedding and normed hidden state side by side, as in EAGLE-3;
            otherwise they are joined first, by ``RecurrentHead.join``.
        normed_residual: whether the hidden state enters the residual stream normed. Of layers that read pairs.
    """

    weights: DecoderLayer
    reads_pairs: bool
    normed_residual: bool = False


@dataclass(frozen=True)
class OwnEmbedding:
    """An embedding that came with the head: how many rows it has, and what reads some of them."""

    rows: int
    read: ReadRows


@dataclass(frozen=True)
class RecurrentHead:
    """All of a head. D is the size of the target's hidden states, k the number of taps.

    Attributes:
        kind: which published design it follows.
        source: where it came from, and ``sha256`` which weights those were.
        architecture: its sizes; one layer.
        taps: ascending; the columns of ``fuse`` and the elements of ``tap_norm`` are in this order.
        tap_norm: gain [k * D] of the norm of what the target gives; ``None`` without.
        fuse: [D, k * D], makes one hidden state of what the target gives; ``None`` where it is one already.
        embedding_norm, hidden_norm: gains [D] of the pair's norms.
        join: [D, 2 * D], the embedding's columns first; ``None`` where the layer reads pairs.
        hidden_rotation: what the graph rotates a normed hidden state by before they are joined; ``None`` for nothing.
        layer: the decoder layer. If it reads pairs, its ``input_norm`` is no norm of its own, and not looked at.
        final_norm: gain [D] of the norm before lm_head.
        normed_feature: whether the feature is taken behind that norm.
        lm_head: [columns, D]; ``None`` for the target's own.
        ids: int64 [columns], ascending, which ids the columns stand for; ``None`` where column i is id i.
        embedding: [rows, D], which came with it; ``None`` without.
    """

    kind: HeadKind
    source: str
    sha256: str
    architecture: Architecture
    taps: tuple[int, ...]
    tap_norm: Float32Array | None
    fuse: Float32Array | None
    embedding_norm: Float32Array
    hidden_norm: Float32Array
    join: Float32Array | None
    layer: HeadLayer
    final_norm: Float32Array
    normed_feature: bool
    lm_head: Float32Array | None
    ids: npt.NDArray[np.int64] | None
    embedding: OwnEmbedding | None
    hidden_rotation: Rotation | None = None
