"""The memory that the pair recipes in ``models/`` are expected to take, by the laws of docs/memory.md.

    python benchmarks/recipe_memory.py           # write [memory] into every recipe
    python benchmarks/recipe_memory.py --check   # exit with 1 if one of them does not say what the laws say

Nothing is measured: the sizes are those of ``model_sizes.toml``, and what a bundle of such models takes is what
``edge-spec plan`` would predict for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from edge_spec.export.pair_recipe import DEVICES_GB, PairRecipe, read_pair_recipe
from edge_spec.export.recipe import DEFAULT_RECIPES, Recipe, find_recipe
from edge_spec.manifest import TOKENIZER, ArchitectureRecord, FileRecord, GraphRecord, Manifest, ModelRecord, RopeRecord
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_budget import DEFAULT_SHARE
from edge_spec.runtime.memory_plan import MemoryPlan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODELS = Path(__file__).parent.parent / "models"
SIZES = Path(__file__).with_name("model_sizes.toml")

# What the system keeps of a device's memory. Of the rest an engine takes its default share.
SYSTEM_BYTES = 1 << 30
KV_TYPES = {"target": ("float32", "int8"), "draft": ("float32", "int8")}

_COMMENT = "# Computed by benchmarks/recipe_memory.py from the models' sizes; not measured."


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
    return matrices * facts["vocabulary"] * hidden + facts["layers"] * layer + hidden


def manifest_of(pair: PairRecipe) -> Manifest:
    """Return the manifest of a bundle of this pair, as far as memory depends on it."""
    models, tokenizers = read_sizes()
    recipes = zip((pair.recipe, pair.draft_recipe), DEFAULT_RECIPES["cpu"], strict=True)
    target_recipe, draft_recipe = (find_recipe(given or default, "cpu") for given, default in recipes)
    target = _record(pair.target, models[pair.target], target_recipe)
    draft = None if pair.draft is None else _record(pair.draft, models[pair.draft], draft_recipe)
    tokenizer = tokenizers[models[pair.target]["tokenizer"]]
    return Manifest(
        created_by="benchmarks/recipe_memory.py",
        device="cpu",
        vocab_size=models[pair.target]["vocabulary"],
        context_length=models[pair.target]["context"],
        eos_token_ids=(),
        bos_token_id=None,
        special_token_ids=(),
        named_tokens={},
        default_sampling={},
        target=target,
        draft=draft,
        files={TOKENIZER: FileRecord(tokenizer, "")},
    )


def _record(source: str, facts: dict[str, Any], recipe: Recipe) -> ModelRecord:
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
    graphs = tuple(GraphRecord("model.onnx", True, kv) for kv in ("float32", "int8"))
    return ModelRecord(source, "", architecture, recipe.to_dict(), None, graphs, None)


def memory_section(pair: PairRecipe) -> str:
    """Return the section ``[memory]`` of a recipe."""
    manifest = manifest_of(pair)
    whole = plan_memory(manifest, None, kv_types=KV_TYPES)
    lines = [
        _COMMENT,
        "[memory]",
        f"context = {whole.configuration.context}",
        f"peak_mib = {_mib(whole)}",
        "",
        "[memory.devices]",
    ]
    for size in DEVICES_GB:
        plan = plan_memory(manifest, int(DEFAULT_SHARE * ((size << 30) - SYSTEM_BYTES)), kv_types=KV_TYPES)
        if plan.fits:
            has = plan.configuration
            lines.append(
                f"{size} = {{ context = {has.context}, draft = {str(has.draft).lower()}, "
                f'kv = "{has.target_kv}", peak_mib = {_mib(plan)} }}'
            )
    return "\n".join(lines) + "\n"


def _mib(plan: MemoryPlan) -> int:
    return -(-plan.total_bytes >> 20)


def main() -> int:
    """Write or check the sections, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a recipe is out of date")
    check = parser.parse_args().check
    stale = []
    for path in sorted(MODELS.glob("*.toml")):
        text = path.read_text("utf-8")
        current = text.split(_COMMENT)[0].rstrip() + "\n\n" + memory_section(read_pair_recipe(path))
        if current != text:
            stale.append(path.name)
            if not check:
                path.write_text(current, "utf-8")
    if stale:
        print("out of date" if check else "written", *stale)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
