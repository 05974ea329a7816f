"""Writes a head beside a target: graph, weights, and the hidden states that the target's graphs have to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from edge_spec.export.graph_tape import compute_type
from edge_spec.export.graph_taps import set_taps
from edge_spec.export.heads.block_checkpoint import BlockCheckpoint, is_block_head
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.head_model_record import GRAPH, WEIGHTS, head_model_record
from edge_spec.export.heads.medusa_checkpoint import MedusaCheckpoint, is_medusa
from edge_spec.export.heads.open_head import read_head
from edge_spec.export.heads.recurrent_graph import build_head_graph
from edge_spec.export.heads.recurrent_head import RecurrentHead
from edge_spec.export.heads.recurrent_packing import pack_head
from edge_spec.export.heads.target_of_bundle import TargetOfBundle
from edge_spec.export.heads.write_block_head import write_block_head
from edge_spec.export.heads.write_medusa import write_medusa
from edge_spec.export.model import describe_architecture
from edge_spec.export.packing import Packer
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Recipe
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import HEAD_IDS, HEAD_MARKOV, GraphRecord, HeadRecord, Manifest
from edge_spec.processor import integer_products_saturate

# Every file of a head, whatever its kind.
HEAD_FILES = (GRAPH, WEIGHTS, HEAD_IDS, HEAD_MARKOV)


def write_head(
    folder: Path,
    manifest: Manifest,
    head_folder: HeadFolder,
    recipe: Recipe,
    taps: Sequence[int] | None,
    progress: Progress,
) -> Manifest:
    """Write a head into the unfinished folder of a bundle.

    Files that are there are replaced, not written into: they may be links to another bundle's.

    Args:
        folder: holds the target.
        manifest: what it is to be so far.
        head_folder: the head's checkpoint.
        recipe: formats of the head's layer classes.
        taps: behind how many layers it reads the target; ``None`` for what its checkpoint says.
        progress: told how far it is.

    Returns:
        The manifest with the head.

    Raises:
        CheckpointError: the head is damaged or does not fit the target.
        UnsupportedError: it is of a kind that is not built.
    """
    progress("export head", 0, 3)
    target = TargetOfBundle(folder, manifest)
    for name in HEAD_FILES:
        (folder / name).unlink(missing_ok=True)
    if is_medusa(head_folder.config, head_folder.tensors):
        heads = MedusaCheckpoint(head_folder, manifest.target.architecture)
        record = write_medusa(heads, manifest, folder / GRAPH, folder / WEIGHTS, recipe, progress)
    elif is_block_head(head_folder.config):
        block = BlockCheckpoint(head_folder, manifest)
        record = write_block_head(block, target, folder / GRAPH, folder / WEIGHTS, recipe, progress)
    else:
        head = read_head(head_folder, manifest, taps, target.final_norm())
        progress("export head", 1, 3)
        record = _write(folder, head, target, recipe)
    progress("export head", 2, 3)
    told = _tell_taps(folder, target, record.taps)
    progress("export head", 3, 3)
    return replace(manifest, target=replace(manifest.target, graphs=told), head=record)


def _write(folder: Path, head: RecurrentHead, target: TargetOfBundle, recipe: Recipe) -> HeadRecord:
    """Write weights, graph and ids, and describe them."""
    with open_weight_file(folder / WEIGHTS) as weights:
        packer = Packer(weights, recipe, target.device, signed_integers=not integer_products_saturate())
        packed = pack_head(head, target, packer, recipe)
    rows = int(packed.embedding.tensors["weight"].shape.numpy()[0])
    facts = replace(head.architecture, logits_size=packed.lm_head.outputs, embedding_rows=rows)
    ir.save(build_head_graph(facts, packed, len(head.taps), target.device), folder / GRAPH)
    if head.ids is not None:
        (folder / HEAD_IDS).write_bytes(head.ids.astype("<u4").tobytes())
    # What is the target's own is stored as that is.
    shared = {"embedding": packed.embedding.format, "lm_head": packed.lm_head.format}
    return HeadRecord(
        kind=head.kind,
        taps=head.taps,
        model=head_model_record(head.source, head.sha256, describe_architecture(facts), recipe, target.device, shared),
        tokens=1,
        names_columns=head.ids is not None,
    )


def _tell_taps(folder: Path, target: TargetOfBundle, taps: tuple[int, ...]) -> tuple[GraphRecord, ...]:
    """Let each of the target's graphs tell the hidden states that a head reads, and no others."""
    facts, graphs = target.record.architecture, []
    for record in target.record.graphs:
        if record.taps != taps:
            path = folder / record.path
            model = ir.load(path)
            set_taps(model, taps, facts.layers, facts.hidden_size, compute_type(target.device), target.rotation)
            path.unlink()
            ir.save(model, path)
        graphs.append(replace(record, taps=taps))
    return tuple(graphs)
