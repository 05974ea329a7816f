"""A head that drafts a block at once, in its storage format, beside a target whose embedding and lm_head it shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edge_spec.export.checkpoint import Float32Array, require_finite
from edge_spec.export.decoder import read_layer
from edge_spec.export.heads.block_checkpoint import BlockCheckpoint
from edge_spec.export.heads.block_graph import PackedBlockHead, PackedBlockLayer
from edge_spec.export.heads.folded_gain import folded_gain
from edge_spec.export.heads.target_of_bundle import TargetOfBundle
from edge_spec.export.packing import Packer
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Recipe
from edge_spec.export.rope import Rope, rotary_tables
from edge_spec.export.rotation import Rotation

# Rows of a Markov head's tables that are read at a time.
_ROWS_AT_ONCE = 1 << 14


def pack_block_head(
    head: BlockCheckpoint, target: TargetOfBundle, packer: Packer, recipe: Recipe, progress: Progress
) -> PackedBlockHead:
    """Store a head, all but its Markov head.

    ``fc`` is stored as the recipe stores attention. Some channels of the hidden states that it reads stand out by far.
    Where that would leave the others few steps of a row's scale, they are rotated.

    Args:
        head: where its weights come from.
        target: it stands beside.
        packer: of the head's own weight file.
        recipe: formats of the head's layer classes.
        progress: told about every layer.

    Raises:
        CheckpointError: a tensor is damaged, or the target's own checkpoint is needed and is gone.
    """
    sizes, stage = head.architecture, "export head"
    hidden, taps = sizes.hidden_size, len(head.facts.taps)

    rotation = Rotation(hidden * taps) if recipe.attention == "w8a8" else None

    def fc_rows(start: int, stop: int) -> Float32Array:
        rows = head.rows("fc.weight", start, stop)
        return rows if rotation is None else rotation.rows(rows)

    fc = packer.matrix("fc", (hidden, hidden * taps), fc_rows, recipe.attention)
    layers = []
    for index in range(sizes.layers):
        progress(stage, index, sizes.layers)
        layers.append(_pack_layer(head, packer, recipe, index))
    packed = PackedBlockHead(
        fc=fc,
        fc_rotation=rotation,
        hidden_norm=packer.vector("hidden_norm", head.tensor("hidden_norm.weight")),
        layers=tuple(layers),
        rotary=_rotary(head, packer),
        norm=packer.vector("norm", head.tensor("norm.weight")),
        to_logits=_to_logits(head, target, packer),
        confidence=_confidence(head, packer),
    )
    progress(stage, sizes.layers, sizes.layers)
    return packed


def write_markov(head: BlockCheckpoint, file: Path) -> None:
    """Write the table of the token before, that of the token to come, and the confidence's weights of the first.

    In float16, since the runtime itself computes with a few rows of them.
    """
    sizes, rank = head.architecture, head.facts.markov_rank
    with file.open("wb") as opened:
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            for start in range(0, sizes.logits_size, _ROWS_AT_ONCE):
                rows = head.rows(name, start, min(start + _ROWS_AT_ONCE, sizes.logits_size))
                opened.write(_half(rows, name, head.source))
        read = np.zeros(rank, np.float32)
        if head.facts.confidence_reads_token:
            read = head.tensor("confidence_head.proj.weight")[0, sizes.hidden_size :]
        opened.write(_half(read, "confidence_head.proj.weight", head.source))


def _pack_layer(head: BlockCheckpoint, packer: Packer, recipe: Recipe, index: int) -> PackedBlockLayer:
    """Store one layer: queries are only projected of the block's rows, keys and values of the features' as well."""
    layer, sizes = read_layer(head, index), head.architecture
    queries = sizes.heads * sizes.head_size
    key_value = layer.qkv[queries:]
    return PackedBlockLayer(
        packer.layer(index, replace(layer, qkv=layer.qkv[:queries])),
        packer.matrix(
            f"layers.{index}.key_value",
            key_value.shape,
            lambda start, stop: key_value[start:stop],
            recipe.attention,
        ),
    )


def _rotary(head: BlockCheckpoint, packer: Packer) -> dict[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]:
    stored = {}
    for index, rope in enumerate(head.architecture.ropes):
        # The block's positions lie behind the last feature's.
        positions = head.architecture.context_length + head.facts.block_size + 1
        cos, sin = (require_finite(table, "rotary table", head.source) for table in rotary_tables(rope, positions))
        name = f"rotary.{index}" if index else "rotary"
        stored[rope] = packer.vector(name + "_cos", cos), packer.vector(name + "_sin", sin)
    return stored


def _to_logits(head: BlockCheckpoint, target: TargetOfBundle, packer: Packer) -> ir.TensorProtocol | None:
    """What turns the head's normed output into what the stored lm_head expects, but for the rotation.

    A rotated lm_head has the gain of the target's final norm in it, with which the head has nothing to do.
    """
    if target.rotation is None:
        return None
    gain = folded_gain(target, head.tensors)
    # What a gain of zero hides is lost.
    return packer.vector("to_logits", np.divide(1, gain, out=np.zeros_like(gain), where=gain != 0))


def _confidence(head: BlockCheckpoint, packer: Packer) -> tuple[ir.TensorProtocol, ir.TensorProtocol] | None:
    """Weight [hidden, 1] and bias [1] of the part of the confidence head that reads the layers' output."""
    if not head.facts.confidence:
        return None
    weight = head.tensor("confidence_head.proj.weight")[:, : head.architecture.hidden_size]
    bias = head.tensor("confidence_head.proj.bias")
    return packer.vector("confidence.weight", weight.T.copy()), packer.vector("confidence.bias", bias)


def _half(values: Float32Array, name: str, source: str) -> bytes:
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    require_finite(stored.astype(np.float32), name, source)
    return stored.tobytes()
