"""The manifest of a bundle that nobody has exported: what a pair recipe and the published sizes of its models say."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.export.draft_chain_graph import CHAIN_LENGTHS
from edge_spec.export.model import GRAPH_FILES
from edge_spec.export.pair_recipe import PairRecipe
from edge_spec.export.recipe import DEFAULT_RECIPES, Device, Recipe, find_recipe, runs_on
from edge_spec.manifest import (
    TOKENIZER,
    ArchitectureRecord,
    FileRecord,
    GraphRecord,
    Manifest,
    ModelRecord,
    RopeRecord,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIZES = Path(__file__).with_name("model_sizes.toml")


@lru_cache(maxsize=1)
def read_sizes() -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return the sizes of the models by hub id, and of the tokenizers by name."""
    table = tomllib.loads(SIZES.read_text("utf-8"))
    models: dict[str, dict[str, Any]] = table["models"]
    return {name: models[facts["same_as"]] if "same_as" in facts else facts for name, facts in models.items()}, table[
        "tokenizer"
    ]


def parameters(facts: dict[str, Any]) -> int:
    """Return how many parameters a model of these sizes has."""
    hidden, head = facts["hidden_size"], facts["head_size"]
    query, kv = facts["heads"] * head, facts["kv_heads"] * head
    layer = 2 * hidden * (query + kv) + 3 * hidden * facts["intermediate_size"] + 2 * hidden
    layer += query + 2 * kv if facts["family"] == "qwen2" else 0  # biases
    layer += 2 * head if facts["family"] in ("qwen3", "gemma3") else 0  # norms of queries and keys
    layer += 2 * hidden if facts["family"] == "gemma3" else 0  # norms behind attention and MLP
    matrices = 1 if facts["tied"] else 2
    return int(matrices * facts["vocabulary"] * hidden + facts["layers"] * layer + hidden)


def planned_manifest(pair: PairRecipe, device: Device = "cpu") -> Manifest:
    """Return the manifest of a bundle of this pair, as far as memory and speed depend on it.

    Args:
        pair: its models have to be among those whose sizes are known.
        device: the flavour. A recipe that does not run there is replaced by the device's default.

    Raises:
        EdgeSpecError: the sizes of a model are not known.
    """
    models, tokenizers = read_sizes()
    for source in (pair.target, pair.draft):
        if source is not None and source not in models:
            raise EdgeSpecError(
                f"The sizes of {source!r} are not known; give one of the shipped recipes "
                "('edge-spec export --list') or a bundle."
            )
    recipes = (pair.recipe, pair.draft_recipe)
    target_recipe, draft_recipe = (
        find_recipe(given if given is not None and runs_on(given, device) else default, device)
        for given, default in zip(recipes, DEFAULT_RECIPES[device], strict=True)
    )
    target = _record(pair.target, models[pair.target], target_recipe, device, is_draft=False)
    draft = None if pair.draft is None else _record(pair.draft, models[pair.draft], draft_recipe, device, is_draft=True)
    return Manifest(
        created_by="published sizes",
        device=device,
        vocab_size=models[pair.target]["vocabulary"],
        context_length=models[pair.target]["context"],
        eos_token_ids=(),
        bos_token_id=None,
        special_token_ids=(),
        named_tokens={},
        default_sampling={},
        target=target,
        draft=draft,
        files={TOKENIZER: FileRecord(tokenizers[models[pair.target]["tokenizer"]], "")},
    )


def _record(source: str, facts: dict[str, Any], recipe: Recipe, device: Device, is_draft: bool) -> ModelRecord:
    sizes = {name: facts[name] for name in ("family", "layers", "hidden_size", "intermediate_size", "heads")}
    architecture = ArchitectureRecord(
        **sizes,
        kv_heads=facts["kv_heads"],
        head_size=facts["head_size"],
        logits_size=facts["vocabulary"],
        context_length=facts["context"],
        ropes=(RopeRecord(10000.0, False, facts["head_size"], facts["layers"]),) * facts.get("ropes", 1),
        sliding_window=None,  # keys and values are kept all the same
        sliding_layers=0,
        tied_embeddings=facts["tied"],
    )
    return ModelRecord(source, "", architecture, recipe.to_dict(), None, planned_graphs(device, is_draft), None)


def planned_graphs(device: Device, is_draft: bool) -> tuple[GraphRecord, ...]:
    """What graphs an export writes for a model that is a draft or not, folders left out."""
    files = GRAPH_FILES[device]
    graphs = [GraphRecord(file.name, file.tree, file.kv, selects=device == "cuda") for file in files]
    if is_draft:
        graphs += [GraphRecord(f"draft{n}.onnx", False, files[0].kv, steps=n) for n in CHAIN_LENGTHS[device]]
    return tuple(graphs)
