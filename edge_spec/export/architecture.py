"""What a decoder is made of, as facts: the sizes, biases and rotary embedding a graph is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.rope import Rope
from edge_spec.manifest_check import LARGEST_SIZES

# In elements: of a cos or sin table, and of a matrix, which export holds in float32.
_LARGEST_TABLE = 1 << 27
_LARGEST_MATRIX = 1 << 32


# silu is x * sigmoid(x); gelu_tanh is the tanh approximation of GELU.
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LayerAttention:
    """How the attention of one layer sees the tokens before it.

    Attributes:
        rope: how it tells where they are; ``None`` where it does not (NoPE).
        window: how many of the last tokens it sees, the row's own included; ``None`` for all.
    """

    rope: Rope | None
    window: int | None = None


class Scales(TypedDict, total=False):
    """What a checkpoint says of the factors in an :class:`Architecture`; those that are missing are the usual ones."""

    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logits_scale: float


@dataclass(frozen=True)
class Architecture:
    """Everything the graph builder and the float32 reference need to know about one model.

    Attributes:
        family: name of the :class:`~edge_spec.export.family.Family`.
        context_length: positions the checkpoint was trained for, or fewer if an export asks for fewer.
        logits_size: rows of lm_head, those of padding ids included.
        attention: one entry for each layer.
        tied_embeddings: whether lm_head is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        fused_projections: whether the checkpoint holds q, k and v, and gate and up, as one matrix each.
        activation: of the gated MLP.
        qk_norm: whether queries and keys are normed, head by head, before they are rotated.
        post_norms: whether what attention and MLP give is normed before it is added to the residual stream.
        embedding_scale: what embeddings are multiplied by.
        attention_scale: what scores are multiplied by; ``None`` for 1 / sqrt(head_size).
        residual_scale: what the outputs of attention and MLP are multiplied by.
        logits_scale: what logits are multiplied by.
        embedding_rows: rows of the embedding where they are not as many; ``None`` where they are.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    logits_size: int
    context_length: int
    norm_epsilon: float
    attention: tuple[LayerAttention, ...]
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    embedding_rows: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.attention)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings, in the order of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.attention if layer.rope is not None))

    @property
    def window(self) -> int | None:
        """The window of the layers that have one, which is the same for all of them."""
        return next((layer.window for layer in self.attention if layer.window is not None), None)


def check_sizes(architecture: Architecture, where: str) -> None:
    """Raise CheckpointError, naming the file ``where``, if the sizes contradict each other."""
    facts = architecture
    for name in LARGEST_SIZES:
        require_size(name, getattr(facts, name), where)
    if facts.heads % facts.kv_heads:
        raise CheckpointError(f"{where}: {facts.heads} attention heads cannot share {facts.kv_heads} key-value heads")
    for rope in facts.ropes:
        # What attention's kernels rotate.
        if facts.head_size % 16 or rope.size % 16 or rope.size > facts.head_size:
            raise UnsupportedError(
                f"{where}: {rope.size} elements of heads of {facts.head_size} are to be rotated; supported are "
                "multiples of 16"
            )

    table = (facts.context_length + 1) * facts.head_size // 2
    if table > _LARGEST_TABLE:
        raise UnsupportedError(
            f"{where}: a context of {facts.context_length} needs a rotary table of {table} elements; supported are "
            f"{_LARGEST_TABLE}"
        )
    widest = max(facts.intermediate_size, facts.logits_size, facts.heads * facts.head_size)
    if widest * facts.hidden_size > _LARGEST_MATRIX:
        raise UnsupportedError(f"{where}: a matrix of {widest} x {facts.hidden_size} is larger than any supported")


def require_size(name: str, size: int, where: str) -> None:
    """Raise CheckpointError if a size, called as in :class:`Architecture`, is beyond any model's."""
    if size > LARGEST_SIZES[name]:
        raise CheckpointError(f"{where}: {name} is {size}, expected at most {LARGEST_SIZES[name]}")


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a checkpoint of this architecture must hold."""
    facts = architecture
    hidden = facts.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (facts.logits_size, hidden)}
    for layer in range(facts.layers):
        prefix = f"layers.{layer}."
        for name, size in _norm_sizes(facts).items():
            shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, columns, biased) in _projections(facts).items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["norm.weight"] = (hidden,)
    if not facts.tied_embeddings:
        shapes["lm_head.weight"] = (facts.logits_size, hidden)
    return shapes


def _norm_sizes(facts: Architecture) -> dict[str, int]:
    sizes = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), facts.hidden_size)
    if facts.post_norms:
        sizes |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), facts.hidden_size)
    if facts.qk_norm:
        sizes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), facts.head_size)
    return sizes


def _projections(facts: Architecture) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, of each projection of a layer."""
    hidden, mlp = facts.hidden_size, facts.intermediate_size
    query, kv = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    qkv = {
        "self_attn.q_proj": (query, hidden, facts.qkv_bias),
        "self_attn.k_proj": (kv, hidden, facts.qkv_bias),
        "self_attn.v_proj": (kv, hidden, facts.qkv_bias),
    }
    gate_up = {
        "mlp.gate_proj": (mlp, hidden, facts.mlp_bias),
        "mlp.up_proj": (mlp, hidden, facts.mlp_bias),
    }
    if facts.fused_projections:
        qkv = {"self_attn.qkv_proj": (query + 2 * kv, hidden, facts.qkv_bias)}
        gate_up = {"mlp.gate_up_proj": (2 * mlp, hidden, facts.mlp_bias)}
    return {
        **qkv,
        "self_attn.o_proj": (hidden, query, facts.output_bias),
        **gate_up,
        "mlp.down_proj": (hidden, mlp, facts.mlp_bias),
    }
