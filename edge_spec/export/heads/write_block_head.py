"""Writes a head that drafts a block at once: its weights and graph beside those of the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from edge_spec.export.heads.block_checkpoint import BlockCheckpoint
from edge_spec.export.heads.block_graph import TargetEnds, build_block_graph
from edge_spec.export.heads.block_packing import pack_block_head, write_markov
from edge_spec.export.heads.head_model_record import head_model_record
from edge_spec.export.heads.target_of_bundle import TargetOfBundle
from edge_spec.export.model import describe_architecture
from edge_spec.export.packing import Packer
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import Recipe
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import HEAD_MARKOV, HeadRecord
from edge_spec.processor import integer_products_saturate


def write_block_head(
    head: BlockCheckpoint,
    target: TargetOfBundle,
    graph: Path,
    data: Path,
    recipe: Recipe,
    progress: Progress,
) -> HeadRecord:
    """Write weights, graph and the Markov head's table, and describe them.

    Args:
        head: its checkpoint.
        target: of the unfinished bundle.
        graph: file of the graph, in the folder of the target's.
        data: file of its weights, beside it.
        recipe: formats of the head's layer classes. Embedding and lm_head are the target's.
        progress: told about every layer.

    Raises:
        CheckpointError: a tensor is damaged, or the target's own checkpoint is needed and is gone.
    """
    facts = head.facts
    ends = TargetEnds(target.embedding(), target.lm_head(), target.rotation)
    with open_weight_file(data) as weights:
        packer = Packer(weights, recipe, target.device, signed_integers=not integer_products_saturate())
        packed = pack_block_head(head, target, packer, recipe, progress)
    ir.save(build_block_graph(facts, packed, ends, target.device), graph)
    if facts.markov_rank:
        write_markov(head, graph.with_name(Path(HEAD_MARKOV).name))
    sizes = replace(
        head.architecture,
        logits_size=ends.lm_head.outputs,
        embedding_rows=target.record.architecture.readable_ids,
        tied_embeddings=target.record.architecture.tied_embeddings,
    )
    formats = {name: str(target.record.recipe[name]) for name in ("embedding", "lm_head")}
    return HeadRecord(
        kind=facts.kind,
        taps=facts.taps,
        model=head_model_record(
            head.source, head.sha256(), describe_architecture(sizes), recipe, target.device, formats
        ),
        tokens=facts.tokens,
        names_columns=False,
        markov_rank=facts.markov_rank,
        confidence=facts.confidence,
    )
