"""Whether a Hugging Face ``config.json`` can be believed: every complaint names the field that is wrong.

What a field says must be possible, what asks for another kind of model must not be overlooked, and the sizes must be
those of the weights. A configuration that was edited or mixed up would otherwise give another model, or an error that
speaks of tensors only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Architecture, tensor_shapes
from edge_spec.export.family import family_of_model_type
from edge_spec.export.metadata import Metadata
from edge_spec.export.safetensors_file import SafetensorsFile
from edge_spec.manifest_check import LARGEST_SIZES

# Field by the name the size has in the manifest.
_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "vocab_size": "logits_size",
    "max_position_embeddings": "context_length",
}

# What other kinds of model have, and none that is built does, by field.
_OTHER_KINDS = {
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size"),
        "a mixture of experts",
    ),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), "layers that predict several tokens"),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), "latent attention"),
    **dict.fromkeys(("mamba_d_state", "ssm_cfg", "state_size", "conv_L_cache"), "layers with a state"),
    "cross_attention_layers": "layers that look at pictures",
    "is_encoder_decoder": "an encoder",
    "use_bidirectional_attention": "attention to the tokens that follow",
    "clip_qkv": "clipped queries, keys and values",
}

# What would change every score or logit.
_NEVER_SET = ("attn_logit_softcapping", "final_logit_softcapping")

_OBJECTS = ("rope_parameters", "rope_scaling")

_QUANTIZED = {
    "fp8": "in 8-bit floats",
    "fbgemm_fp8": "in 8-bit floats",
    "awq": "by AWQ",
    "gptq": "by GPTQ",
    "bitsandbytes": "by bitsandbytes",
    "compressed-tensors": "by compressed-tensors",
    "mxfp4": "in MXFP4",
}

# Configuration fields that decide the shape of a tensor, by what its name ends with.
_FIELDS = {
    ("embed_tokens", "lm_head"): ("vocab_size", "hidden_size"),
    ("q_proj", "o_proj"): ("num_attention_heads", "head_dim", "hidden_size"),
    ("k_proj", "v_proj"): ("num_key_value_heads", "head_dim", "hidden_size"),
    ("qkv_proj",): ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    ("gate_proj", "up_proj", "down_proj", "gate_up_proj"): ("intermediate_size", "hidden_size"),
    ("q_norm", "k_norm"): ("head_dim",),
}

# Multiples of it are the head sizes that attention's kernels rotate.
_HEAD_SIZE_STEP = 16

_COMPARED_ROWS = 4096


def check_config(config: Metadata) -> None:
    """Check what can be checked without the weights.

    Args:
        config: of the language model.

    Raises:
        CheckpointError: a field is out of its range or contradicts another.
        UnsupportedError: a field asks for what is not built.
    """
    family = family_of_model_type(config.text("model_type"), config.where)
    config = Metadata(
        {**family.defaults, **{key: value for key, value in config.items() if value is not None}}, config.where
    )
    refuse_quantized(config)
    refuse_other_kinds(config)
    for key in _NEVER_SET:
        if config.get(key) is not None:
            raise UnsupportedError(f"{config.where}: {key} is {config[key]!r}, which is not supported; expected null")
    for key in _OBJECTS:
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise CheckpointError(f"{config.where}: {key!r} is {config[key]!r}, expected an object")
    _check_heads(config, {key: _size(config, key) for key in _SIZES})
    if config.get("rms_norm_eps") is not None and config.number("rms_norm_eps") >= 1:
        raise CheckpointError(
            f"{config.where}: 'rms_norm_eps' is {config['rms_norm_eps']!r}, expected a small number such as 1e-6"
        )
    if config.get("query_pre_attn_scalar") is not None:
        config.integer("query_pre_attn_scalar")
    listed, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(listed, list) and len(listed) != layers:
        raise CheckpointError(
            f"{config.where}: 'num_hidden_layers' is {layers!r}, but 'layer_types' has {len(listed)} entries, expected "
            f"one for each of {layers} layers"
        )


def refuse_other_kinds(config: Metadata, allowed: Sequence[str] = ()) -> None:
    """Raise UnsupportedError if a field, other than those allowed, asks for a kind of model that is not built."""
    for key, kind in _OTHER_KINDS.items():
        if config.get(key) and key not in allowed:
            raise UnsupportedError(f"{config.where}: {key!r} is {config[key]!r}, which asks for {kind}: not supported")


def _check_heads(config: Metadata, sizes: Mapping[str, int | None]) -> None:
    """Raise CheckpointError if heads cannot be made of the sizes, or cannot be rotated."""
    heads, kv_heads, hidden = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["hidden_size"]
    if heads is None or hidden is None:
        return
    if kv_heads is not None and heads % kv_heads:
        raise CheckpointError(
            f"{config.where}: 'num_attention_heads' is {heads} and 'num_key_value_heads' {kv_heads}, but {heads} heads "
            f"cannot share {kv_heads} key-value heads"
        )
    head_size, origin = sizes["head_dim"], "'head_dim' is"
    if head_size is None:
        if hidden % heads:
            raise CheckpointError(
                f"{config.where}: 'hidden_size' is {hidden}, which is no multiple of 'num_attention_heads', {heads}, "
                "and there is no 'head_dim'"
            )
        head_size, origin = hidden // heads, "'head_dim' is not set, but by 'hidden_size' and 'num_attention_heads'"
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = Metadata({**config, **parameters}, config.where).number("partial_rotary_factor", 1.0)
    rotated = head_size * share
    if rotated > head_size or int(rotated) % _HEAD_SIZE_STEP or head_size % _HEAD_SIZE_STEP:
        raise UnsupportedError(
            f"{config.where}: {origin} {head_size}, and with a 'partial_rotary_factor' of {share:g}, {int(rotated)} "
            f"elements of heads of {head_size} are to be rotated; supported are multiples of {_HEAD_SIZE_STEP}"
        )


def check_weights(
    config: Metadata, architecture: Architecture, stored: Mapping[str, tuple[SafetensorsFile, str]]
) -> None:
    """Check that the weights are those the configuration speaks of.

    Args:
        config: of the language model.
        architecture: as read from it.
        stored: where the tensors of the language model are, file and name in there, by their names in
            :func:`tensor_shapes`.

    Raises:
        CheckpointError: a field contradicts the weights.
    """
    where = config.where
    shapes = {name: file.tensors[there].shape for name, (file, there) in stored.items()}
    layers = len({match[1] for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))})
    if layers != architecture.layers and layers:
        raise CheckpointError(
            f"{where}: 'num_hidden_layers' is {architecture.layers}, but the weights hold {layers} layers"
        )
    expected = tensor_shapes(architecture)
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None and name.endswith(".bias"):
            raise CheckpointError(
                f"{where}: {_bias_field(name)!r} is {config.get(_bias_field(name))!r}, but the weights lack {name!r}"
            )
        if found is not None and found != shape:
            fields = next((fields for ends, fields in _FIELDS.items() if name.split(".")[-2] in ends), ("hidden_size",))
            raise CheckpointError(
                f"{where}: {' or '.join(map(repr, fields))} does not fit the weights: {name!r} has shape {found}, "
                f"expected {shape}"
            )
    for name in shapes:
        if name.endswith("proj.bias") and name not in expected:
            raise CheckpointError(
                f"{where}: {_bias_field(name)!r} is {config.get(_bias_field(name))!r}, but the weights hold {name!r}"
            )
    _check_head(config, architecture, stored)


def _check_head(
    config: Metadata, architecture: Architecture, stored: Mapping[str, tuple[SafetensorsFile, str]]
) -> None:
    """Raise CheckpointError if lm_head is, or is not, the embedding, against what the configuration says."""
    head, embedding = "lm_head.weight", "embed_tokens.weight"
    tied = f"{config.where}: 'tie_word_embeddings' is {'true' if architecture.tied_embeddings else 'false'}"
    if not architecture.tied_embeddings:
        if head not in stored and embedding in stored:
            raise CheckpointError(f"{tied}, but the weights lack {head!r}; if it is the embedding, set it to true")
    elif head in stored and embedding in stored and not _same(stored[head], stored[embedding]):
        raise CheckpointError(
            f"{tied}, but the weights hold a {head!r} that is not the embedding; if it is what counts, set it to false"
        )


def _same(first: tuple[SafetensorsFile, str], second: tuple[SafetensorsFile, str]) -> bool:
    """Compare two tensors, some rows at a time."""
    shapes = {file.tensors[name].shape for file, name in (first, second)}
    if len(shapes) > 1:
        return False
    count = shapes.pop()[0]
    return all(
        np.array_equal(
            first[0].rows(first[1], start, min(start + _COMPARED_ROWS, count)),
            second[0].rows(second[1], start, min(start + _COMPARED_ROWS, count)),
        )
        for start in range(0, count, _COMPARED_ROWS)
    )


def _size(config: Metadata, key: str) -> int | None:
    """Return a size, ``None`` where the configuration leaves it to the family."""
    if config.get(key) is None:
        return None
    size, largest = config.integer(key), LARGEST_SIZES[_SIZES[key]]
    if size > largest:
        raise CheckpointError(f"{config.where}: {key!r} is {size}, expected at most {largest}")
    return size


def refuse_quantized(config: Metadata) -> None:
    """Raise UnsupportedError if the weights are quantized."""
    for key in ("quantization_config", "compression_config"):
        stored = config.get(key)
        if not stored:
            continue
        method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
        how = _QUANTIZED.get(method, "") if isinstance(method, str) else ""
        raise UnsupportedError(
            f"{config.where}: the checkpoint is quantized {how + ' ' if how else ''}({key}, quant_method {method!r}), "
            "and quantizing it once more would add up the errors; give the original one in bfloat16, float16 or "
            "float32, which mostly has the same name without its ending (-FP8, -AWQ, -GPTQ, -bnb-4bit), or a GGUF file"
        )


def _bias_field(name: str) -> str:
    return "mlp_bias" if ".mlp." in name else "attention_bias"
