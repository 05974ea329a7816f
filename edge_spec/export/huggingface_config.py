"""What a Hugging Face ``config.json`` says of the architecture."""

from __future__ import annotations

from collections.abc import Mapping

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Activation, Architecture, LayerAttention, Scales, require_size
from edge_spec.export.family import Family, Windows, family_of_model_type
from edge_spec.export.metadata import Metadata
from edge_spec.export.rope import Rope
from edge_spec.export.rope_scaling import longrope_context, rope_from_config

_FULL, _SLIDING = "full_attention", "sliding_attention"

# Of families whose layers differ in what they see, and say so in ``layer_types``.
_MIXED: tuple[Windows, ...] = ("late", "most", "rotated")

_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
}


def text_config(config: Metadata) -> Metadata:
    """Return the configuration of the language model, of one that also sees pictures that part."""
    values = config.get("text_config")
    if values is None:
        return config
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{config.where}: 'text_config' is {values!r}, expected an object")
    # What tells how the weights are stored, and what they share, stands outside.
    outer = {
        key: config[key] for key in ("quantization_config", "tie_word_embeddings", "eos_token_id") if key in config
    }
    model_type = {"model_type": config.get("model_type")}
    return Metadata({**outer, **model_type, **values}, f"text_config of {config.where}")


def read_architecture(config: Metadata, context: int | None) -> tuple[Family, Architecture]:
    """Return the family and the sizes of a model.

    Args:
        config: the configuration of its language model, which :func:`check_config` has passed.
        context: positions that are wanted; ``None`` for what the model was trained for.

    Raises:
        CheckpointError: a value is missing, out of its range or contradicts another.
        UnsupportedError: a model of this kind is not built.
    """
    where = config.where
    family = family_of_model_type(config.text("model_type"), where)
    # A window that is set to null is none; any other null is an absent key.
    given = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    config = Metadata({**family.defaults, **given}, where)
    _require_activation(config, family)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_size = config.integer("head_dim", max(1, hidden // heads))
    require_size("head_size", head_size, where)
    layers = config.integer("num_hidden_layers")
    require_size("layers", layers, where)
    context_length = _context_length(config, context)
    attention_bias = config.flag("attention_bias", False)
    return family, Architecture(
        family=family.name,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_size=head_size,
        logits_size=config.integer("vocab_size"),
        context_length=context_length,
        norm_epsilon=config.number("rms_norm_eps"),
        attention=_read_attention(config, family, layers, head_size, context_length),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        fused_projections=family.fused_projections,
        activation=family.activation,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        **_read_scales(config, family, hidden),
    )


def _require_activation(config: Metadata, family: Family) -> None:
    known = _ACTIVATIONS[family.activation]
    for key in ("hidden_activation", "hidden_act"):
        if config.get(key) is not None and config.text(key) not in known:
            raise UnsupportedError(
                f"{config.where}: {key} {config[key]!r} is not supported; supported for {family.name} are "
                f"{', '.join(known)}"
            )


def _read_scales(config: Metadata, family: Family, hidden: int) -> Scales:
    """Return the factors of a family that has some."""
    if family.scaled_by_size:
        return {
            "embedding_scale": hidden**0.5,
            "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
        }
    if family.multipliers:
        return {
            "embedding_scale": config.number("embedding_multiplier", 1.0),
            "attention_scale": config.number("attention_multiplier", 1.0),
            "residual_scale": config.number("residual_multiplier", 1.0),
            "logits_scale": 1 / config.number("logits_scaling", 1.0),
        }
    return {}


def _context_length(config: Metadata, wanted: int | None) -> int:
    """The positions a bundle is made for. LongRoPE models have factors of their own for short texts: those, if none."""
    trained = config.integer("max_position_embeddings")
    if wanted is None:
        return min(trained, longrope_context(config) or trained)
    if not 2 <= wanted <= trained:
        raise CheckpointError(f"{config.where}: a context of {wanted} tokens is wanted, expected 2 to {trained}")
    return wanted


def _read_attention(
    config: Metadata, family: Family, layers: int, head_size: int, context: int
) -> tuple[LayerAttention, ...]:
    types = _layer_types(config, family, layers)
    slides = _SLIDING in types
    window = config.integer("sliding_window") if slides else None
    if window is not None and window >= context:
        window = None
    ropes = {_FULL: rope_from_config(config, head_size, context)}
    ropes[_SLIDING] = _local_rope(config, head_size, context) if family.local_rope else ropes[_FULL]
    rotated = _rotated_layers(config, layers) if family.skips_rotation else [True] * layers
    return tuple(
        LayerAttention(ropes[kind] if rotates else None, window if kind == _SLIDING else None)
        for kind, rotates in zip(types, rotated, strict=True)
    )


def _local_rope(config: Metadata, head_size: int, context: int) -> Rope:
    """The rotary embedding of layers that see a window only."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and _SLIDING in parameters:
        return rope_from_config(config, head_size, context, _SLIDING)
    return rope_from_config(
        Metadata({"rope_theta": config.number("rope_local_base_freq")}, config.where), head_size, context
    )


def _layer_types(config: Metadata, family: Family, layers: int) -> list[str]:
    """Return for each layer whether it sees all tokens or a window."""
    listed = config.get("layer_types")
    if family.windows not in _MIXED and (
        config.flag("use_sliding_window", False) or (isinstance(listed, list) and _SLIDING in listed)
    ):
        raise UnsupportedError(
            f"{config.where}: 'use_sliding_window' or 'layer_types' asks for sliding-window attention in some layers, "
            f"which a {family.name} does not have"
        )
    if family.windows in _MIXED and listed is not None:
        if not isinstance(listed, list) or len(listed) != layers:
            given = f"{len(listed)} entries" if isinstance(listed, list) else repr(listed)
            raise CheckpointError(
                f"{config.where}: 'layer_types' has {given}, expected one for each of {layers} layers"
            )
        for kind in listed:
            if kind not in (_FULL, _SLIDING):
                raise UnsupportedError(
                    f"{config.where}: 'layer_types' names {kind!r}, which is not supported; supported are {_FULL}, "
                    f"{_SLIDING}"
                )
        return listed
    if family.windows == "all":
        return [_FULL if config.get("sliding_window") is None else _SLIDING] * layers
    if family.windows == "late" and config.flag("use_sliding_window", False):
        first = config.integer("max_window_layers", 28, minimum=0)
        return [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if family.windows == "most":
        pattern = config.integer("sliding_window_pattern")
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]
    if family.windows == "rotated" and config.flag("use_sliding_window", False):
        return [_FULL if rotates else _SLIDING for rotates in _rotated_layers(config, layers)]
    return [_FULL] * layers


def _rotated_layers(config: Metadata, layers: int) -> list[bool]:
    """Return for each layer, of which some have none, whether it has a rotary embedding."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(value not in (0, 1) for value in listed):
        raise CheckpointError(
            f"{config.where}: 'no_rope_layers' is {listed!r}, expected 0 (none) or 1 for each of {layers} layers"
        )
    return [value == 1 for value in listed]
