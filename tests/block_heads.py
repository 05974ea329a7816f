"""Random DFlash and DSpark heads in the published layouts, and a reference of them that shares no code with export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from head_checkpoints import Tensors, gain, matrix, rms_norm, rotated

HEADS, KV_HEADS, HEAD_SIZE, MLP, THETA = 4, 2, 16, 96, 500.0


def block_tensors(hidden: int, taps: int, layers: int, seed: int = 0) -> Tensors:
    """What DFlash and DSpark have in common, by the published names."""
    random = torch.Generator().manual_seed(seed)
    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.gate_proj": (MLP, hidden), "mlp.up_proj": (MLP, hidden)}
    shapes |= {"mlp.down_proj": (hidden, MLP)}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": HEAD_SIZE, "self_attn.k_norm": HEAD_SIZE}
    tensors = {"fc.weight": matrix(random, hidden, taps * hidden)}
    tensors |= {name: gain(random, hidden) for name in ("hidden_norm.weight", "norm.weight")}
    for layer in range(layers):
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = matrix(random, *shape)
        for name, size in norms.items():
            tensors[f"layers.{layer}.{name}.weight"] = gain(random, size)
    return tensors


def dspark_tensors(hidden: int, vocabulary: int, rank: int, seed: int = 1) -> Tensors:
    """What DSpark has besides; numbers that float16 holds."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "markov_head.markov_w1.weight": torch.randn(vocabulary, rank, generator=random),
        "markov_head.markov_w2.weight": torch.randn(vocabulary, rank, generator=random) * 0.5,
        "confidence_head.proj.weight": torch.randn(1, hidden + rank, generator=random) * 0.3,
        "confidence_head.proj.bias": torch.randn(1, generator=random),
    }
    return {name: value.half().float() for name, value in tensors.items()}


def block_config(
    kind: str, hidden: int, vocabulary: int, layers: int, ids: list[int], **changes: Any
) -> dict[str, Any]:
    """The configuration beside them, where each kind keeps its own part."""
    own = {"mask_token_id": vocabulary - 1, "target_layer_ids": ids}
    sizes = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": 5,
    }
    if kind == "dflash":
        return {"architectures": ["DFlashDraftModel"], **sizes, "dflash_config": own, **changes}
    return {"architectures": ["Qwen3DSparkModel"], **sizes, **own, **changes}


def block_hidden(
    tensors: Tensors, config: dict[str, Any], taps: Tensor, anchor: int, embedding: Tensor, first: int = 0
) -> Tensor:
    """The head's output in every row of the block, float32 [block, hidden], of a whole text at once, without a cache.

    Args:
        tensors: of the head.
        config: of the head.
        taps: float32 [tokens, taps * hidden], of all tokens before the anchor.
        anchor: the text's last token.
        embedding: of the target.
        first: position of the first token.
    """
    block, said = config["block_size"], {**config, **config.get("dflash_config", {})}
    ids = torch.tensor([anchor] + [said["mask_token_id"]] * (block - 1))
    x, features = embedding[ids], rms_norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    positions = torch.arange(first, first + len(taps) + block)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        normed = rms_norm(x, layer["input_layernorm.weight"])
        rows = torch.cat([features, normed])
        query = _heads(normed, layer, "q", HEADS)
        key = _heads(rows, layer, "k", KV_HEADS)
        value = (rows @ layer["self_attn.v_proj.weight"].T).view(len(rows), KV_HEADS, HEAD_SIZE)
        query, key = rotated(query, positions[-block:], THETA), rotated(key, positions, THETA)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_SIZE**0.5
        read = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(block, -1)
        x = x + read @ layer["self_attn.o_proj.weight"].T
        normed = rms_norm(x, layer["post_attention_layernorm.weight"])
        gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x, tensors["norm.weight"])


def _heads(rows: Tensor, layer: Tensors, part: str, heads: int) -> Tensor:
    projected = (rows @ layer[f"self_attn.{part}_proj.weight"].T).view(len(rows), heads, HEAD_SIZE)
    return rms_norm(projected, layer[f"self_attn.{part}_norm.weight"])
