"""What a decoder is made of, as facts: the sizes, biases and rotary embedding a graph is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class Family:
    """A line of models that share one layer layout. Supporting a new line starts with an entry in ``FAMILIES``.

    Attributes:
        name: the family's name in manifests and messages.
        hf_model_types: values of ``model_type`` in a Hugging Face ``config.json``.
        gguf_architectures: values of ``general.architecture`` in a GGUF file.
        qkv_bias: whether q, k and v carry a bias when the configuration does not say.
        gguf_permuted_qk: whether GGUF stores the rows of q and k in interleaved rotary order.
    """

    name: str
    hf_model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    qkv_bias: bool = False
    gguf_permuted_qk: bool = False


FAMILIES: Sequence[Family] = (
    Family("llama", ("llama", "mistral"), ("llama",), gguf_permuted_qk=True),
    Family("qwen2", ("qwen2",), ("qwen2",), qkv_bias=True),
)


def family_of_model_type(model_type: str, where: str) -> Family:
    """Return the family of a Hugging Face ``model_type``. Raises UnsupportedError, naming ``where``, if unknown."""
    for family in FAMILIES:
        if model_type in family.hf_model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.hf_model_types)
    raise UnsupportedError(f"{where}: model_type {model_type!r} is not supported; supported are {known}")


def family_of_gguf_architecture(architecture: str, where: str) -> Family:
    """Return the family of a GGUF ``general.architecture``. Raises UnsupportedError, naming ``where``, if unknown."""
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.gguf_architectures)
    raise UnsupportedError(f"{where}: GGUF architecture {architecture!r} is not supported; supported are {known}")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head, rotate-half layout.

    Attributes:
        theta: base of the geometric frequency series.
        frequency_factors: ``head_size / 2`` divisors of the inverse frequencies, or ``None`` for all ones.
            Every static scaling scheme (linear, Llama 3) reduces to such divisors.
    """

    theta: float
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Architecture:
    """Everything the graph builder and the float32 reference need to know about one model.

    Attributes:
        family: name of the :class:`Family`.
        context_length: positions the checkpoint was trained for.
        vocab_size: rows of the embedding, padding rows included.
        tied_embeddings: whether lm_head is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
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


def check_sizes(architecture: Architecture, where: str) -> None:
    """Raise CheckpointError, naming the file ``where``, if the sizes contradict each other."""
    facts = architecture
    if facts.heads % facts.kv_heads:
        raise CheckpointError(f"{where}: {facts.heads} attention heads cannot share {facts.kv_heads} key-value heads")
    if facts.head_size % 2:
        raise CheckpointError(f"{where}: heads of {facts.head_size} elements cannot be rotated, the size must be even")


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
