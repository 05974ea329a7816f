"""Writes Medusa heads beside their target: weights, graph, and the record of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.heads.head_model_record import head_model_record
from edge_spec.export.heads.medusa_checkpoint import MedusaCheckpoint
from edge_spec.export.heads.medusa_graph import PackedMedusaHead, build_medusa_graph
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.export.packing import Packer
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Recipe
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import HEAD_IDS, ArchitectureRecord, HeadRecord, Manifest
from edge_spec.processor import integer_products_saturate

Ids = npt.NDArray[np.int64]


def write_medusa(
    heads: MedusaCheckpoint,
    manifest: Manifest,
    graph: Path,
    weights: Path,
    recipe: Recipe,
    progress: Progress,
    ids: Ids | None = None,
) -> HeadRecord:
    """Write the graph and weights of Medusa heads into the folder of a target's graphs, and describe them.

    Residual blocks are stored as the recipe stores ``mlp_up``, and lm_heads as it stores ``lm_head``. The target's
    graphs are to tell the hidden states behind all of its layers.

    Args:
        heads: where their weights come from.
        manifest: of the target's bundle.
        graph: file to write the graph to, and its ids beside it.
        weights: file beside it.
        recipe: storage format of each layer class.
        progress: told about every head.
        ids: int64 [n], ascending: what the heads may propose; ``None`` for all of the vocabulary.

    Raises:
        CheckpointError: a tensor is missing, damaged or does not fit, or the target's checkpoint is gone.
    """
    stage, target = "export head", manifest.target.architecture
    checkpoint = checkpoint_of(manifest.target, "final norm")
    packed = []
    with open_weight_file(weights) as file:
        packer = Packer(file, recipe, manifest.device, signed_integers=not integer_products_saturate())
        # The published heads read the states as the target's own lm_head does, but for a scale of the logits.
        final_norm = packer.vector("final_norm", checkpoint.tensor("norm.weight"))
        for head in range(heads.heads):
            progress(stage, head, heads.heads)
            packed.append(_pack(heads, head, packer, recipe, (target.logits_size, target.hidden_size), ids))
    epsilon = checkpoint.architecture.norm_epsilon
    ir.save(build_medusa_graph(target.hidden_size, epsilon, final_norm, packed, manifest.device), graph)
    if ids is not None:
        (graph.parent / Path(HEAD_IDS).name).write_bytes(ids.astype("<u4").tobytes())
    progress(stage, heads.heads, heads.heads)
    return HeadRecord(
        kind="medusa",
        taps=(target.layers,),
        model=head_model_record(heads.source, heads.sha256, _describe(heads, target, ids), recipe, manifest.device),
        tokens=heads.heads,
        names_columns=ids is not None,
    )


def _pack(
    heads: MedusaCheckpoint, head: int, packer: Packer, recipe: Recipe, shape: tuple[int, int], ids: Ids | None
) -> PackedMedusaHead:
    """Store one head, whose lm_head has rows for all of the vocabulary or for some ids."""
    name = f"heads.{head}."
    blocks = []
    for layer in range(heads.layers):
        weight, bias = heads.block(head, layer)

        def block_rows(start: int, stop: int, weight: Float32Array = weight) -> Float32Array:
            return weight[start:stop]

        block = f"{name}blocks.{layer}"
        matrix = packer.matrix(block, weight.shape, block_rows, recipe.mlp_up)
        blocks.append((matrix, packer.vector(block + ".bias", bias)))

    def lm_head_rows(start: int, stop: int) -> Float32Array:
        if ids is None:
            return heads.lm_head_rows(head, start, stop)
        wanted = ids[start:stop]
        first, last = int(wanted[0]), int(wanted[-1])
        return heads.lm_head_rows(head, first, last + 1)[wanted - first]

    rows = shape if ids is None else (len(ids), shape[1])
    return PackedMedusaHead(tuple(blocks), packer.matrix(name + "lm_head", rows, lm_head_rows, recipe.lm_head))


def _describe(heads: MedusaCheckpoint, target: ArchitectureRecord, ids: Ids | None) -> ArchitectureRecord:
    """Sizes of the heads, which have no attention, and so next to nothing of a cache."""
    return replace(
        target,
        layers=heads.layers,
        intermediate_size=target.hidden_size,
        heads=1,
        kv_heads=1,
        head_size=1,
        logits_size=target.logits_size if ids is None else len(ids),
        ropes=(),
        sliding_window=None,
        sliding_layers=0,
        tied_embeddings=False,
        embedding_rows=target.readable_ids,
    )
