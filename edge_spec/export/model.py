"""Exports one model: streams its layers from the checkpoint into a weight file, then writes the graphs over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.cache_scales import TEXT as CALIBRATION_TEXT
from edge_spec.export.cache_scales import CacheScales, cache_scales
from edge_spec.export.checkpoint import Checkpoint, encode_text, require_finite
from edge_spec.export.conditioning import Conditioner, rotation_of
from edge_spec.export.decoder import read_final_norm, read_layer
from edge_spec.export.draft_chain_graph import CHAIN_LENGTHS, ChoiceOfTokens, build_draft_chain
from edge_spec.export.graph import build_graph
from edge_spec.export.graph_run import run_graph
from edge_spec.export.graph_tape import compute_type
from edge_spec.export.graph_taps import check_taps, set_taps
from edge_spec.export.packing import PackedLayer, PackedModel, Packer
from edge_spec.export.progress import Progress
from edge_spec.export.quality import MAX_TOKENS, TEXT, compare, require_quality
from edge_spec.export.recipe import Device, Recipe
from edge_spec.export.reference import Float32Reference
from edge_spec.export.rope import Rope, rotary_tables
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import ArchitectureRecord, CacheType, GraphRecord, ModelRecord, RopeRecord
from edge_spec.processor import integer_products_saturate

Float32Array = npt.NDArray[np.float32]

WEIGHTS = "model.onnx.data"

# Special tokens that the scales of an int8 cache are calibrated with; some vocabularies have hundreds.
_MOST_MARKERS = 16


@dataclass(frozen=True)
class GraphFile:
    """A graph that is written for every model; drafts have more of them (export/draft_chain_graph.py)."""

    name: str
    tree: bool
    kv: CacheType


# On CPU the bias costs nothing, so one graph does both; on CUDA it takes the slower attention kernel.
GRAPH_FILES: dict[Device, tuple[GraphFile, ...]] = {
    "cpu": (GraphFile("model.onnx", tree=True, kv="float32"), GraphFile("model.kv8.onnx", tree=True, kv="int8")),
    "cuda": (
        GraphFile("model.onnx", tree=False, kv="float16"),
        GraphFile("model_tree.onnx", tree=True, kv="float16"),
    ),
}


def export_model(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: Recipe,
    device: Device,
    check: bool,
    progress: Progress,
    choice: ChoiceOfTokens | None = None,
    taps: Sequence[int] = (),
) -> ModelRecord:
    """Write one model's graphs and weights into ``folder`` and describe them.

    Args:
        checkpoint: where the weights come from.
        folder: created; its name labels the progress reports.
        recipe: storage format of each layer class.
        device: flavour of the graphs.
        check: compare the written graph with the float32 reference. An int8 cache's scales are measured in any case.
        progress: told about every layer.
        choice: what a draft chooses from, which gets graphs that draft several tokens in a call, where the device
            profits; ``None`` without those.
        taps: after which layers the graphs tell their hidden states (export/graph_taps.py).

    Raises:
        CheckpointError: the checkpoint is damaged.
        QualityError: the written graph strays too far from the reference.
        EdgeSpecError: there is no such layer.
    """
    check_taps(taps, checkpoint.architecture.layers)
    folder.mkdir()
    text_ids = _text_ids(checkpoint) if check else None
    signed_integers = not integer_products_saturate()
    with open_weight_file(folder / WEIGHTS) as weights:
        packer = Packer(weights, recipe, device, signed_integers)
        conditioner = Conditioner(checkpoint, recipe)
        model, reference_logits = _pack(checkpoint, packer, conditioner, text_ids, f"export {folder.name}", progress)
    facts, files = checkpoint.architecture, GRAPH_FILES[device]
    usable = min(checkpoint.vocabulary.size, facts.logits_size)
    selects_of = usable if device == "cuda" else None
    plain = [file for file in files if file.kv != "int8"]
    rounded = [file for file in files if file.kv == "int8"]
    rotation = rotation_of(recipe, facts)

    def save(graph: ir.Model, name: str) -> None:
        set_taps(graph, taps, facts.layers, facts.hidden_size, compute_type(device), rotation)
        ir.save(graph, folder / name)

    for file in plain:
        save(build_graph(facts, model, device, file.tree, selects_of=selects_of), file.name)
    selects = selects_of is not None
    graphs = [
        GraphRecord(f"{folder.name}/{file.name}", file.tree, file.kv, tuple(taps), selects=selects) for file in files
    ]
    if choice is not None:
        for steps in CHAIN_LENGTHS[device]:
            name = f"draft{steps}.onnx"
            ir.save(build_draft_chain(facts, model, device, steps, choice), folder / name)
            graphs.append(GraphRecord(f"{folder.name}/{name}", False, files[0].kv, steps=steps))

    quality = None
    if check or rounded:
        # One run serves the check and the scales: its rows do not see what is read behind them.
        read = _calibration_ids(checkpoint) if rounded else _text_ids(checkpoint)
        stage, steps = f"check {folder.name}", facts.layers + 1
        scales: list[CacheScales] = []

        def on_layer(layer: int, keys: Float32Array, values: Float32Array) -> None:
            rope = facts.attention[layer].rope
            scales.append(cache_scales(keys, values, 0 if rope is None else rope.size))
            progress(stage, layer + 1, steps)

        progress(stage, 0, steps)
        logits = run_graph(folder / plain[0].name, read, range(0 if text_ids is None else len(text_ids)), on_layer)
        if logits is not None and reference_logits is not None:
            quality = compare(logits[:, :usable], reference_logits[:, :usable])
            require_quality(quality, recipe, checkpoint.source)
        for file in rounded:
            save(build_graph(facts, model, device, file.tree, scales), file.name)
        progress(stage, steps, steps)

    has_integers = "w8a8" in recipe.formats.values()
    return ModelRecord(
        source=checkpoint.source,
        source_sha256=checkpoint.sha256(),
        architecture=describe_architecture(facts),
        recipe=recipe.to_dict(),
        integer_weights=("int8" if signed_integers else "uint8") if has_integers else None,
        graphs=tuple(graphs),
        quality=quality,
    )


def _pack(
    checkpoint: Checkpoint,
    packer: Packer,
    conditioner: Conditioner,
    text_ids: npt.NDArray[np.int64] | None,
    stage: str,
    progress: Progress,
) -> tuple[PackedModel, Float32Array | None]:
    """Stream the checkpoint through the packer and, if a text is given, through the float32 reference."""
    facts = checkpoint.architecture
    steps = facts.layers + 2
    reference = None
    if text_ids is not None:
        reference = Float32Reference(facts, _embed(checkpoint, text_ids))

    layers = []
    for index in range(facts.layers):
        progress(stage, index, steps)
        layers.append(_pack_layer(checkpoint, packer, conditioner, reference, index))
    progress(stage, facts.layers, steps)

    final_norm = read_final_norm(checkpoint)
    hidden = None if reference is None else reference.final_hidden(final_norm)
    logits = None if hidden is None else np.empty((len(hidden), facts.logits_size), np.float32)
    head_name = "embed_tokens.weight" if facts.tied_embeddings else "lm_head.weight"

    def read_head_rows(start: int, stop: int) -> Float32Array:
        rows = checkpoint.rows(head_name, start, stop)
        if hidden is not None and logits is not None:
            np.matmul(hidden, rows.T, out=logits[:, start:stop])
        return conditioner.head_rows(rows, final_norm)

    def read_embedding_rows(start: int, stop: int) -> Float32Array:
        return conditioner.embedding_rows(checkpoint.rows("embed_tokens.weight", start, stop))

    vocabulary_shape = (facts.logits_size, facts.hidden_size)
    lm_head = packer.lm_head(vocabulary_shape, read_head_rows, conditioner.head_importance(final_norm))
    progress(stage, facts.layers + 1, steps)
    embedding_shape = (facts.embedding_rows or facts.logits_size, facts.hidden_size)
    embedding = packer.embedding(embedding_shape, read_embedding_rows, lm_head if facts.tied_embeddings else None)
    model = PackedModel(
        embedding=embedding,
        rotary=_rotary(checkpoint, packer),
        layers=tuple(layers),
        final_norm=packer.vector("final_norm", conditioner.final_norm(final_norm)),
        lm_head=lm_head,
    )
    progress(stage, steps, steps)
    return model, logits


def _rotary(checkpoint: Checkpoint, packer: Packer) -> dict[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]:
    """Store the tables of each rotary embedding."""
    stored = {}
    for index, rope in enumerate(checkpoint.architecture.ropes):
        name = f"rotary.{index}" if index else "rotary"
        # One more than the context: the padding row of a target call lies behind the last token.
        cos, sin = (
            require_finite(table, "rotary table", checkpoint.source)
            for table in rotary_tables(rope, checkpoint.architecture.context_length + 1)
        )
        stored[rope] = packer.vector(name + "_cos", cos), packer.vector(name + "_sin", sin)
    return stored


def _pack_layer(
    checkpoint: Checkpoint,
    packer: Packer,
    conditioner: Conditioner,
    reference: Float32Reference | None,
    index: int,
) -> PackedLayer:
    """Stream one layer. A function of its own, so that its float32 weights are gone before the next layer's come."""
    layer = read_layer(checkpoint, index)
    if reference is not None:
        reference.run_layer(layer)
    return packer.layer(index, *conditioner.layer(layer))


def _text_ids(checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    ids = encode_text(checkpoint.vocabulary, TEXT, checkpoint.source)
    return np.array(ids[: min(MAX_TOKENS, checkpoint.architecture.context_length)], np.int64)


def _calibration_ids(checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    """What a cache's scales are to be right for: the text of the numeric check, special tokens and another text."""
    vocabulary = checkpoint.vocabulary
    markers = vocabulary.special_token_ids[:_MOST_MARKERS]
    text = encode_text(vocabulary, CALIBRATION_TEXT, checkpoint.source)
    ids = [*_text_ids(checkpoint), *markers, *text]
    return np.array(ids, np.int64)[: checkpoint.architecture.context_length]


def _embed(checkpoint: Checkpoint, token_ids: npt.NDArray[np.int64]) -> Float32Array:
    return np.concatenate([checkpoint.rows("embed_tokens.weight", int(token), int(token) + 1) for token in token_ids])


def describe_architecture(facts: Architecture) -> ArchitectureRecord:
    """What a manifest says of the sizes of a model."""
    return ArchitectureRecord(
        family=facts.family,
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_size=facts.head_size,
        logits_size=facts.logits_size,
        context_length=facts.context_length,
        ropes=tuple(
            RopeRecord(
                theta=rope.theta,
                scaled=rope.frequency_factors is not None,
                size=rope.size,
                layers=sum(layer.rope == rope for layer in facts.attention),
            )
            for rope in facts.ropes
        ),
        sliding_window=facts.window,
        sliding_layers=sum(layer.window is not None for layer in facts.attention),
        tied_embeddings=facts.tied_embeddings,
        embedding_rows=facts.embedding_rows,
    )
