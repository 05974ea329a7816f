"""The lines of models that can be exported, and how checkpoints name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_spec.errors import UnsupportedError
from edge_spec.export.architecture import Activation


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
    Family("mistral", ("mistral",), (), defaults={"sliding_window": 4096}),
    Family("qwen2", ("qwen2",), ("qwen2",), qkv_bias=True),
    Family("qwen3", ("qwen3",), ("qwen3",), qk_norm=True, defaults={"head_dim": 128}),
    Family(
        "smollm3",
        ("smollm3",),
        ("smollm3",),
        gguf_permuted_qk=True,
        defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    Family(
        "gemma3",
        ("gemma3_text", "gemma3"),
        ("gemma3",),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        gains_from_one=True,
        defaults=_GEMMA3_DEFAULTS,
    ),
    Family("phi3", ("phi3",), ("phi3",), fused_projections=True),
    Family("granite", ("granite",), ("granite",), gguf_permuted_qk=True),
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
    return _find_family(names, architecture, f"{where}: GGUF architecture")


def _find_family(names: Mapping[str, Family], name: str, what: str) -> Family:
    if name not in names:
        raise UnsupportedError(f"{what} {name!r} is not supported; supported are {', '.join(names)}")
    return names[name]
