"""The lines of models that can be exported, and how checkpoints name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge_spec.errors import UnsupportedError
from edge_spec.export.architecture import Activation

# Which layers of a model see only the last tokens, if its configuration gives a window and does not list the layers:
# none ever, all, those from ``max_window_layers`` on, all but every so many, or those with a rotary embedding.
Windows = Literal["none", "all", "late", "most", "rotated"]


@dataclass(frozen=True)
class Family:
    """A line of models that share one layer layout. Supporting a new line starts with an entry in ``FAMILIES``.

    Attributes:
        name: the family's name in manifests and messages.
        hf_model_types: values of ``model_type`` in a Hugging Face ``config.json``.
        gguf_architectures: values of ``general.architecture`` in a GGUF file.
        qkv_bias: whether q, k and v carry a bias when the configuration does not say.
        gguf_permuted_qk: whether GGUF stores the rows of q and k in interleaved rotary order.
        activation: of the gated MLP.
        qk_norm, post_norms, fused_projections: as in :class:`~edge_spec.export.architecture.Architecture`.
        windows: which layers have one.
        local_rope: whether layers with a window have a rotary embedding of their own.
        skips_rotation: whether some layers have no rotary embedding.
        scaled_by_size: whether embeddings are multiplied by the root of their size, and scores by that of a size which
            is not the head's.
        multipliers: whether the configuration has factors of embeddings, scores, residuals and logits.
        gains_from_one: whether Hugging Face checkpoints store how far norm gains are from one. GGUF stores the gains.
        defaults: what an absent key of ``config.json`` stands for, where it may be absent.
    """

    name: str
    hf_model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    qkv_bias: bool = False
    gguf_permuted_qk: bool = False
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    fused_projections: bool = False
    windows: Windows = "none"
    local_rope: bool = False
    skips_rotation: bool = False
    scaled_by_size: bool = False
    multipliers: bool = False
    gains_from_one: bool = False
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)


# The second half of a sparse Gemma 3 configuration: the published ones leave out what transformers fills in.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}

FAMILIES: Sequence[Family] = (
    Family("llama", ("llama",), ("llama",), gguf_permuted_qk=True),
    Family("mistral", ("mistral",), (), windows="all", defaults={"sliding_window": 4096}),
    Family("qwen2", ("qwen2",), ("qwen2",), qkv_bias=True, windows="late"),
    Family("qwen3", ("qwen3",), ("qwen3",), qk_norm=True, windows="late", defaults={"head_dim": 128}),
    Family(
        "smollm3",
        ("smollm3",),
        ("smollm3",),
        gguf_permuted_qk=True,
        windows="rotated",
        skips_rotation=True,
        defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    Family(
        "gemma3",
        ("gemma3_text", "gemma3"),
        ("gemma3",),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        windows="most",
        local_rope=True,
        scaled_by_size=True,
        gains_from_one=True,
        defaults=_GEMMA3_DEFAULTS,
    ),
    Family("phi3", ("phi3",), ("phi3",), fused_projections=True, windows="all"),
    Family("granite", ("granite",), ("granite",), gguf_permuted_qk=True, multipliers=True),
)


def family_of_model_type(model_type: str, where: str) -> Family:
    """Return the family of a Hugging Face ``model_type``. Raises UnsupportedError, naming ``where``, if unknown."""
    names = {name: family for family in FAMILIES for name in family.hf_model_types}
    if model_type not in names:
        raise UnsupportedError(
            f"{where}: model_type {model_type!r} is not supported; supported are {', '.join(names)}. "
            "--via optimum exports many others, slower ones"
        )
    return names[model_type]


def family_of_gguf_architecture(architecture: str, where: str) -> Family:
    """Return the family of a GGUF ``general.architecture``. Raises UnsupportedError, naming ``where``, if unknown."""
    names = {name: family for family in FAMILIES for name in family.gguf_architectures}
    if architecture not in names:
        raise UnsupportedError(
            f"{where}: GGUF architecture {architecture!r} is not supported; supported are {', '.join(names)}"
        )
    return names[architecture]
