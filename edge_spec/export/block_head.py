"""Exports a head that drafts a block at once: its weights and graph beside those of the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edge_spec.export.block_checkpoint import BlockCheckpoint, BlockFacts
from edge_spec.export.block_graph import PackedBlockHead, PackedBlockLayer, TargetEnds, build_block_graph
from edge_spec.export.checkpoint import Checkpoint, Float32Array, require_finite
from edge_spec.export.decoder import read_final_norm, read_layer
from edge_spec.export.packing import PackedMatrix, Packer
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Device, Recipe
from edge_spec.export.rope import rotary_tables
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import HEAD_MARKOV, ArchitectureRecord, GraphRecord, HeadRecord, ModelRecord, RopeRecord
from edge_spec.processor import integer_products_saturate

GRAPH, WEIGHTS = "head.onnx", "head.onnx.data"

# Rows of a Markov head's tables that are read at a time.
_ROWS_AT_ONCE = 1 << 14


def export_block_head(
    head: BlockCheckpoint,
    checkpoint: Checkpoint,
    target: TargetEnds,
    folder: Path,
    recipe: Recipe,
    device: Device,
    progress: Progress,
) -> HeadRecord:
    """Write the graph and weights of a head into the folder of a target's graphs, and describe them.

    ``fc`` and attention are stored as the recipe stores attention. Embedding and lm_head are the target's own. A Markov
    head is stored in float16, for the runtime computes with a few of its rows.

    Args:
        head: where its weights come from.
        checkpoint: the target's, for the norm that its stored lm_head expects.
        target: the stored embedding and lm_head.
        folder: of the target's graphs.
        recipe: storage format of each layer class.
        device: flavour of the graph.
        progress: told about every layer.

    Raises:
        CheckpointError: a tensor is damaged.
    """
    facts, sizes, stage = head.facts, head.architecture, "export head"
    signed_integers, layers = not integer_products_saturate(), []
    with open_weight_file(folder / WEIGHTS) as weights:
        packer = Packer(weights, recipe, device, signed_integers)
        hidden = sizes.hidden_size
        fc = packer.matrix(
            "fc",
            (hidden, hidden * len(facts.taps)),
            lambda start, stop: head.rows("fc.weight", start, stop),
            recipe.attention,
        )
        for index in range(sizes.layers):
            progress(stage, index, sizes.layers)
            layers.append(_pack_layer(head, packer, recipe, index))
        packed = PackedBlockHead(
            fc=fc,
            hidden_norm=packer.vector("hidden_norm", head.tensor("hidden_norm.weight")),
            layers=tuple(layers),
            rotary=_rotary(head, packer),
            norm=packer.vector("norm", head.tensor("norm.weight")),
            to_logits=_to_logits(checkpoint, target, packer),
            confidence=_confidence(head, packer),
        )
    ir.save(build_block_graph(facts, packed, target, device), folder / GRAPH)
    if facts.markov_rank:
        _write_markov(head, folder / Path(HEAD_MARKOV).name)
    progress(stage, sizes.layers, sizes.layers)
    return HeadRecord(
        kind=facts.kind,
        taps=facts.taps,
        model=ModelRecord(
            source=head.source,
            source_sha256=head.sha256(),
            architecture=_describe(facts, target.lm_head),
            recipe=recipe.to_dict(),
            integer_weights=("int8" if signed_integers else "uint8") if "w8a8" in recipe.formats.values() else None,
            graphs=(GraphRecord(f"{folder.name}/{GRAPH}", True, "float32" if device == "cpu" else "float16"),),
            quality=None,
        ),
        tokens=facts.tokens,
        names_columns=False,
        markov_rank=facts.markov_rank,
        confidence=facts.confidence,
    )


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


def _rotary(head: BlockCheckpoint, packer: Packer) -> dict:
    stored = {}
    for index, rope in enumerate(head.architecture.ropes):
        # The block's positions lie behind the last feature's.
        positions = head.architecture.context_length + head.facts.block_size + 1
        cos, sin = (
            require_finite(table, "rotary table", head.source) for table in rotary_tables(rope, positions)
        )
        name = f"rotary.{index}" if index else "rotary"
        stored[rope] = packer.vector(name + "_cos", cos), packer.vector(name + "_sin", sin)
    return stored


def _to_logits(checkpoint: Checkpoint, target: TargetEnds, packer: Packer) -> ir.TensorProtocol | None:
    """What turns the head's normed output into what the stored lm_head expects, but for the rotation.

    A rotated lm_head has the gain of the target's final norm in it, with which the head has nothing to do.
    """
    scale = checkpoint.architecture.logits_scale
    if target.rotation is None:
        factor = np.full(checkpoint.architecture.hidden_size, scale, np.float32)
    else:
        gain = read_final_norm(checkpoint)
        # What a gain of zero hides is lost.
        factor = np.divide(np.float32(scale), gain, out=np.zeros_like(gain), where=gain != 0)
    return None if (factor == 1).all() else packer.vector("to_logits", factor)


def _confidence(head: BlockCheckpoint, packer: Packer) -> tuple[ir.TensorProtocol, ir.TensorProtocol] | None:
    """Weight [hidden, 1] and bias [1] of the part of the confidence head that reads the layers' output."""
    if not head.facts.confidence:
        return None
    weight = head.tensor("confidence_head.proj.weight")[:, : head.architecture.hidden_size]
    bias = head.tensor("confidence_head.proj.bias")
    return packer.vector("confidence.weight", weight.T.copy()), packer.vector("confidence.bias", bias)


def _write_markov(head: BlockCheckpoint, file: Path) -> None:
    """Write the table of the token before, that of the token to come, and the confidence's weights of the first."""
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


def _half(values: Float32Array, name: str, source: str) -> bytes:
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    require_finite(stored.astype(np.float32), name, source)
    return stored.tobytes()


def _describe(facts: BlockFacts, lm_head: PackedMatrix) -> ArchitectureRecord:
    sizes = facts.architecture
    return ArchitectureRecord(
        family=sizes.family,
        layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        logits_size=lm_head.outputs,
        context_length=sizes.context_length,
        ropes=tuple(
            RopeRecord(rope.theta, rope.frequency_factors is not None, rope.size, sizes.layers)
            for rope in sizes.ropes
        ),
        sliding_window=None,
        sliding_layers=0,
        tied_embeddings=True,
    )
