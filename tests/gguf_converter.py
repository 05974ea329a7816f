"""Writes transformers models to GGUF files by the rules of llama.cpp's own converter (its folder ``conversion``).

Names of tensors come from the ``gguf`` package's tables, so that nothing here is taken from the reader under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH
from transformers import PreTrainedModel

from gguf_files import tokenizer_metadata, write_gguf

Array = npt.NDArray[np.float32]

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "granite": MODEL_ARCH.GRANITE,
}
# LlamaModel.undo_permute in llama.py, and the classes derived from it: SmolLM3Model, GraniteModel.
_PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3, MODEL_ARCH.GRANITE)


def convert(path: Path, model: PreTrainedModel, tokenizer: Mapping[str, Any] | None = None) -> Path:
    """Write a model in float32 and return the file; without a tokenizer it gets a byte-level one that fits."""
    architecture = ARCHITECTURES[model.config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    if tokenizer is None:
        tokenizer = tokenizer_metadata(merges=("z z",), padding=model.config.vocab_size - 258, eos_token_id=257)
    facts = {f"{name}.{key}": value for key, value in _facts(architecture, model.config.to_dict()).items()}
    return write_gguf(path, {"general.architecture": name, **facts, **tokenizer}, _tensors(architecture, model))


def _facts(architecture: MODEL_ARCH, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if architecture == MODEL_ARCH.PHI3:
        return _phi3_facts(config, rope)
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    # TextModel.set_gguf_parameters in base.py.
    facts = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if "rope_theta" in local:
        facts["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        facts |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for key, stored in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            if rope.get(key) is not None:
                facts[f"rope.scaling.yarn_{stored}"] = float(rope[key])
    if config.get("head_dim") is not None and architecture != MODEL_ARCH.GRANITE:
        facts |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture in _PERMUTED:  # LlamaModel.set_gguf_parameters
        facts |= {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_size(config)}
    if architecture == MODEL_ARCH.GEMMA3:  # Gemma3Model.set_gguf_parameters in gemma.py
        facts["attention.sliding_window"] = config["sliding_window"]
    if architecture == MODEL_ARCH.GRANITE:  # GraniteModel.set_gguf_parameters in granite.py
        facts |= {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    return facts


def _phi3_facts(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Phi3MiniModel.set_gguf_parameters and .generate_extra_tensors in phi.py."""
    original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
    rotated = int(rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // config["num_attention_heads"]
    facts = {
        "context_length": config["max_position_embeddings"],
        "rope.scaling.original_context_length": original,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": rotated,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if "long_factor" in rope:
        scale = config["max_position_embeddings"] / original
        facts["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return facts


def _tensors(architecture: MODEL_ARCH, model: PreTrainedModel) -> dict[str, Array]:
    config = model.config.to_dict()
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {}
    for name, parameter in model.named_parameters():  # leaves out a tied lm_head
        values = parameter.detach()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if architecture in _PERMUTED and ".q_proj." in name:
            values = _permute(values, config["num_attention_heads"])
        if architecture in _PERMUTED and ".k_proj." in name:
            values = _permute(values, config["num_key_value_heads"])
        if architecture == MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):  # Gemma3Model.norm_shift
            values = values + 1
        tensors[stored] = values.numpy()
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(rope, _head_size(config))
    if "long_factor" in rope:
        tensors["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        tensors["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
    return tensors


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """LlamaModel.permute in llama.py: the halves of each head are shuffled into one another."""
    return torch.stack(
        [half for head in rows.split(len(rows) // heads) for pair in zip(*head.chunk(2), strict=True) for half in pair]
    )


def _llama3_factors(rope: Mapping[str, Any], size: int) -> Array:
    """LlamaModel.generate_extra_tensors in llama.py."""
    factors = []
    for pair in range(size // 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (2 * pair / size))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
