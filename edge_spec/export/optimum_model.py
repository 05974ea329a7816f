"""Exports one model by way of optimum-onnx: traced by torch, written anew by our contract, measured like any other."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export.checkpoint import encode_text
from edge_spec.export.optimum_checkpoint import OptimumCheckpoint
from edge_spec.export.optimum_graph import GraphSizes, rewrite_graph
from edge_spec.export.progress import Progress
from edge_spec.export.quality import MAX_TOKENS, TEXT, compare, require_quality
from edge_spec.export.recipe import RECIPES, Device, Recipe, find_recipe
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import ArchitectureRecord, GraphRecord, ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime

Float32Array = npt.NDArray[np.float32]

DEFAULT_RECIPE = "fp32"

_GRAPH, _WEIGHTS = "model.onnx", "model.onnx.data"
_MATRICES = ("attention", "mlp_up", "mlp_down", "lm_head")
# A model may be asked for single rows as well as for many, and with a past as well as without.
_CALLS = (1, 2, 1, 7, 31)


def optimum_recipe(recipe: str | Recipe | None, device: Device) -> Recipe:
    """Return the recipe for a model by way of optimum, which has matrices of one format and its embedding in float32.

    Raises:
        EdgeSpecError: the recipe is unknown, or not to be had this way.
    """
    found = find_recipe(recipe or DEFAULT_RECIPE, "cpu")
    if device != "cpu":
        raise EdgeSpecError(f"Graphs by way of optimum run on the CPU only, and cannot be had for {device}.")
    formats = {found.formats[layer_class] for layer_class in _MATRICES}
    if not formats <= {"fp32", "int4"} or len({found.attention, found.mlp_up, found.mlp_down}) > 1:
        possible = ", ".join(name for name, known in RECIPES.items() if known.lm_head in ("fp32", "int4"))
        raise EdgeSpecError(
            f"Recipe {found.name!r} cannot be had by way of optimum; {possible} can, with the embedding in float32."
        )
    return replace(found, embedding="fp32")


def export_optimum_model(
    checkpoint: OptimumCheckpoint, folder: Path, recipe: Recipe, check: bool, progress: Progress
) -> ModelRecord:
    """Write one model's graph and weights into ``folder`` and describe them; arguments as of ``export_model``.

    Raises:
        CheckpointError: transformers or optimum-onnx fails on the checkpoint, which may be damaged.
        UnsupportedError: the graph is none that can be used.
        QualityError: the written graph strays too far from the model in float32.
    """
    stage = f"export {folder.name}"
    folder.mkdir()
    traced = folder / "traced"
    progress(stage, 0, 1)
    model = checkpoint.load()
    reference, ids = None, None
    if check:
        ids = _text_ids(checkpoint)
        reference = checkpoint.logits(model, ids)
    file = checkpoint.export(model, traced)
    del model
    gc.collect()
    with open_weight_file(folder / _WEIGHTS) as weights:
        graph, sizes = rewrite_graph(
            ir.load(file), weights, recipe, checkpoint.source, lambda done, all_: progress(stage, done, all_)
        )
        ir.save(graph, folder / _GRAPH)
    shutil.rmtree(traced)
    if sizes.logits_size != checkpoint.architecture.logits_size:
        raise CheckpointError(
            f"{checkpoint.source} has {sizes.logits_size} logits, but a vocabulary of "
            f"{checkpoint.architecture.logits_size}"
        )

    quality = None
    if reference is not None and ids is not None:
        progress(f"check {folder.name}", 0, 1)
        logits, usable = _run(folder / _GRAPH, sizes, ids), checkpoint.vocabulary.size
        quality = compare(logits[:, :usable], reference[:, :usable])
        require_quality(quality, recipe, checkpoint.source)
        progress(f"check {folder.name}", 1, 1)
    return ModelRecord(
        source=checkpoint.source,
        source_sha256=checkpoint.sha256(),
        architecture=_describe(checkpoint, sizes),
        recipe=recipe.to_dict(),
        integer_weights=None,
        graphs=(GraphRecord(f"{folder.name}/{_GRAPH}", tree=False, kv="float32", via="optimum"),),
        quality=quality,
    )


def _text_ids(checkpoint: OptimumCheckpoint) -> npt.NDArray[np.int64]:
    ids = encode_text(checkpoint.vocabulary, TEXT, checkpoint.source)
    return np.array(ids[: min(MAX_TOKENS, checkpoint.architecture.context_length)], np.int64)


def _run(graph: Path, sizes: GraphSizes, token_ids: npt.NDArray[np.int64]) -> Float32Array:
    """Logits of a text that is read in calls of several widths, float32 [tokens, vocab]."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    slots = [f"{layer}.{part}" for layer in range(sizes.layers) for part in ("key", "value")]
    shape = (1, sizes.kv_heads, len(token_ids), sizes.head_size)
    caches = {slot: np.zeros(shape, np.float32) for slot in slots}
    found: list[Float32Array] = []
    start = call = 0
    while start < len(token_ids):
        part = token_ids[start : start + _CALLS[call % len(_CALLS)]]
        feeds = {
            "input_ids": part[None],
            "past_length": np.array([start], np.int64),
            "logit_rows": np.arange(len(part)),
            **{f"past_key_values.{slot}": cache for slot, cache in caches.items()},
        }
        logits, *rows = session.run(["logits", *(f"new.{slot}" for slot in slots)], feeds)
        found.append(logits[0])
        for slot, new in zip(slots, rows, strict=True):
            caches[slot][:, :, start : start + len(part)] = new
        start, call = start + len(part), call + 1
    return np.concatenate(found)


def _describe(checkpoint: OptimumCheckpoint, sizes: GraphSizes) -> ArchitectureRecord:
    facts = checkpoint.architecture
    return ArchitectureRecord(
        family=checkpoint.model_type,
        layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.widest,
        heads=facts.heads if facts.heads % sizes.kv_heads == 0 else sizes.kv_heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        logits_size=sizes.logits_size,
        context_length=facts.context_length,
        ropes=(),
        sliding_window=None,
        sliding_layers=0,
        tied_embeddings=False,
    )
