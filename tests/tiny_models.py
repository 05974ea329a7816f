"""Tiny random checkpoints in Hugging Face format, so that export and runtime are tested on real graphs in no time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from edge_spec.export import export_pair
from edge_spec.export.draft_place import DraftDevice
from edge_spec.export.recipe import Device

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
}

# Contexts that are stretched beyond 32 tokens, fewer than the texts of tests have.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
# Two sets of divisors, the short ones for up to 128 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 128,
}

# One model of each family with what sets it apart. Windows are shorter than the texts of tests.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "smollm3": {"family": "smollm3", "num_hidden_layers": 4},
    "gemma3": {
        "family": "gemma3",
        # Of six layers every third sees everything.
        "num_hidden_layers": 6,
        "sliding_window_pattern": 3,
        "sliding_window": 24,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3": {"family": "phi3", "sliding_window": 20, "head_dim": 32, "partial_rotary_factor": 0.5},
    "granite": {
        "family": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
}

# On matrices this small, several threads only wait for each other.
torch.set_num_threads(1)

HEAD_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tokens of two and three letters, and two that differ from a byte by a space.
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "a"), ("Ġ", "the"), ("l", "l")]
EOS, IM_START, IM_END = 256 + len(_MERGES), 257 + len(_MERGES), 258 + len(_MERGES)
TOKENS = 259 + len(_MERGES)


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of 267 ids: the bytes, eight merges and three special tokens."""
    texts = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in _MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer


def letter_tokenizer(letters: str) -> Tokenizer:
    """Return a tokenizer of one id per letter, and ``</s>`` after them; other characters vanish."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def random_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a float32 model of ``SIZES`` with ``changes``, every parameter random, norms and biases included.

    Weights are scaled so that logits spread over a few nats: the next token is neither certain nor a toss-up.
    """
    config_class, model_class = _FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**{**SIZES, "pad_token_id": None, **changes})).eval()
    norm_gain = 0.0 if family == "gemma3" else 1.0  # Gemma's are stored as distances from one
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                gain = 1.4 if "embed" in name or "lm_head" in name else 1.6
                parameter.copy_(noise * (gain / parameter.shape[1] ** 0.5))
            else:
                parameter.copy_(0.3 * noise + (norm_gain if "norm" in name else 0.0))
    return model


def perturbed(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """Return a copy whose weights are off by ``amount`` times their spread: a draft that agrees now and then."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (amount * parameter.std()))
    return copy


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer | None = None,
    eos: int | list[int] | None = EOS,
    chat_template: str | None = None,
) -> Path:
    """Write a checkpoint folder and return it."""
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def export_tiny(
    folder: Path,
    *,
    recipe: str = "fp32",
    device: Device = "cpu",
    draft_device: DraftDevice | None = None,
    draft: str | None = None,
    draft_recipe: str | None = None,
    draft_changes: Mapping[str, Any] | None = None,
    letters: str | None = None,
    eos: int | list[int] | None = EOS,
    chat_template: str | None = None,
    **changes: Any,
) -> Path:
    """Export a random target of ``SIZES`` with ``changes`` into ``folder`` and return the bundle's path.

    ``draft`` is ``None``, ``"same"`` (the target itself), ``"close"`` (with some noise on its weights) or ``"far"`` (a
    stranger, with ``draft_changes``). ``letters`` replaces the byte-level tokenizer by one of these letters.
    """
    tokenizer = None if letters is None else letter_tokenizer(letters)
    target = random_model(**changes)
    drafts = {
        "same": lambda: target,
        "close": lambda: perturbed(target, 0.05),
        "far": lambda: random_model(**{**changes, "seed": 9, "num_hidden_layers": 1, **(draft_changes or {})}),
    }
    sources = [save_checkpoint(folder / "target", target, tokenizer, eos, chat_template)]
    if draft is not None:
        sources.append(save_checkpoint(folder / "draft", drafts[draft](), tokenizer, eos))
    return export_pair(
        sources[0],
        sources[1] if draft is not None else None,
        folder / "bundle",
        recipe=recipe,
        draft_recipe=draft_recipe or ("fp32" if device == "cpu" else None),
        device=device,
        draft_device=draft_device,
        check=False,
    ).path
