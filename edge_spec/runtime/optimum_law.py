"""What a model by way of optimum takes in memory: the laws of docs/memory.md for graphs that nobody knows in advance.

How many matrices there are is not written down, so their bytes follow from the size of the weight file. Attention is
made of many operators, each of which makes something new of the past.
"""

from __future__ import annotations

from edge_spec.manifest import Manifest, ModelRecord
from edge_spec.runtime.model import PREFILL_ROWS

# A session holds several kilobytes for each of its nodes: so many bytes for each of the graph's file.
_GRAPH = 66

# Values of the past that live at once in one layer: keys and values, cut out of the cache and joined with the new rows;
# what is made of one of them for every query head; and scores.
_CUT, _SPREAD, _SCORES = 4, 2, 3


def uses_optimum(model: ModelRecord) -> bool:
    """Whether a model's graphs come by way of optimum."""
    return model.graphs[0].via == "optimum"


def session_bytes(model: ModelRecord, manifest: Manifest) -> int:
    """Bytes of a session beyond those of one with few nodes."""
    return _GRAPH * manifest.files[model.graphs[0].path].bytes if uses_optimum(model) else 0


def packed_bytes(model: ModelRecord, manifest: Manifest) -> tuple[int, int]:
    """Bytes of the matrices as kernels have packed them, and of the largest one as stored."""
    facts = model.architecture
    embedding = facts.logits_size * facts.hidden_size
    file = manifest.files.get(f"{model.graphs[0].path}.data")
    stored = max(0, (0 if file is None else file.bytes) - 4 * embedding)
    if model.recipe["attention"] != "int4":
        return stored, 4 * embedding
    # Scales and sums of each block are packed with the integers, and what those were made of stays mapped.
    block = int(model.recipe.get("block_size", 32))
    packed = stored * (block / 2 + 12.5) / (block / 2 + 4.5)
    return int(packed), embedding // 2 if model.recipe["lm_head"] == "int4" else 4 * embedding


def workspace_bytes(model: ModelRecord, context: int) -> int:
    """Bytes of what attention of one layer makes of a full past, and of all layers' new rows."""
    facts = model.architecture
    past = context * facts.head_size * (_CUT * facts.kv_heads + _SPREAD * facts.heads)
    scores = _SCORES * PREFILL_ROWS * context * facts.heads
    new_rows = 2 * facts.layers * facts.kv_heads * facts.head_size * PREFILL_ROWS
    return 4 * (past + scores + new_rows)
