"""What a decoder is made of, as facts: the sizes, biases and rotary embedding a graph is built from."""

from __future__ import annotations

from dataclasses import dataclass

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.rope import Rope
from edge_spec.manifest_check import LARGEST_SIZES

# In elements: of a cos or sin table, and of a matrix, which export holds in float32.
_LARGEST_TABLE = 1 << 27
_LARGEST_MATRIX = 1 << 32


@dataclass(frozen=True)
class Architecture:
    """Everything the graph builder and the float32 reference need to know about one model.

    Attributes:
        family: name of the :class:`~edge_spec.export.family.Family`.
        context_length: positions the checkpoint was trained for.
        vocab_size: rows of the embedding, padding rows included.
        tied_embeddings: whether lm_head is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        embedding_rows: rows of the embedding where they are not those of lm_head, whose number is then ``vocab_size``.
    """

    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_rows: int | None = None


def check_sizes(architecture: Architecture, where: str) -> None:
    """Raise CheckpointError, naming the file ``where``, if the sizes contradict each other."""
    facts = architecture
    for name in LARGEST_SIZES:
        require_size(name, getattr(facts, "vocab_size" if name == "logits_size" else name), where)
    if facts.heads % facts.kv_heads:
        raise CheckpointError(f"{where}: {facts.heads} attention heads cannot share {facts.kv_heads} key-value heads")
    if facts.head_size % 2:
        raise CheckpointError(f"{where}: heads of {facts.head_size} elements cannot be rotated, the size must be even")

    table = (facts.context_length + 1) * facts.head_size // 2
    if table > _LARGEST_TABLE:
        raise UnsupportedError(
            f"{where}: a context of {facts.context_length} needs a rotary table of {table} elements; supported are "
            f"{_LARGEST_TABLE}"
        )
    widest = max(facts.intermediate_size, facts.vocab_size, facts.heads * facts.head_size)
    if widest * facts.hidden_size > _LARGEST_MATRIX:
        raise UnsupportedError(f"{where}: a matrix of {widest} x {facts.hidden_size} is larger than any supported")


def require_size(name: str, size: int, where: str) -> None:
    """Raise CheckpointError if a size, called as in :class:`Architecture`, is beyond any model's."""
    if size > LARGEST_SIZES[name]:
        raise CheckpointError(f"{where}: {name} is {size}, expected at most {LARGEST_SIZES[name]}")


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a checkpoint of this architecture must hold."""
    facts = architecture
    hidden, mlp = facts.hidden_size, facts.intermediate_size
    query, kv = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    projections = {
        "self_attn.q_proj": (query, hidden, facts.qkv_bias),
        "self_attn.k_proj": (kv, hidden, facts.qkv_bias),
        "self_attn.v_proj": (kv, hidden, facts.qkv_bias),
        "self_attn.o_proj": (hidden, query, facts.output_bias),
        "mlp.gate_proj": (mlp, hidden, facts.mlp_bias),
        "mlp.up_proj": (mlp, hidden, facts.mlp_bias),
        "mlp.down_proj": (hidden, mlp, facts.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (facts.vocab_size, hidden)}
    for layer in range(facts.layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, biased) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["norm.weight"] = (hidden,)
    if not facts.tied_embeddings:
        shapes["lm_head.weight"] = (facts.vocab_size, hidden)
    return shapes
