"""Random heads in the layouts that heads are published in, and a reference of them that shares no code with export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_SIZE, MLP = 4, 2, 16, 96

Tensors = dict[str, Tensor]


def layer_tensors(random: torch.Generator, hidden: int, inputs: int, **sizes: int) -> Tensors:
    """A decoder layer whose attention projects ``inputs`` elements."""
    mlp, head_size = sizes.get("mlp", MLP), sizes.get("head_size", HEAD_SIZE)
    query, kv = sizes.get("heads", HEADS) * head_size, sizes.get("kv_heads", KV_HEADS) * head_size
    shapes = {"self_attn.q_proj": (query, inputs), "self_attn.k_proj": (kv, inputs), "self_attn.v_proj": (kv, inputs)}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    shapes |= {"mlp.down_proj": (hidden, mlp)}
    tensors = {f"{name}.weight": matrix(random, *shape) for name, shape in shapes.items()}
    return tensors | {
        f"{name}.weight": gain(random, hidden) for name in ("input_layernorm", "post_attention_layernorm")
    }


def matrix(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random) * (1.2 / shape[-1] ** 0.5)


def gain(random: torch.Generator, size: int) -> Tensor:
    return 1 + 0.3 * torch.randn(size, generator=random)


def eagle3_tensors(
    hidden: int, ids: Sequence[int], vocabulary: int, taps: int = 3, seed: int = 0, **sizes: int
) -> Tensors:
    """The tensors of an EAGLE-3 head as SafeAILab and SpecForge name them."""
    random = torch.Generator().manual_seed(seed)
    columns = len(ids)
    layer = {f"midlayer.{name}": value for name, value in layer_tensors(random, hidden, 2 * hidden, **sizes).items()}
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[list(ids)] = True
    return {
        **layer,
        "midlayer.hidden_norm.weight": gain(random, hidden),
        "fc.weight": matrix(random, hidden, taps * hidden),
        "norm.weight": gain(random, hidden),
        "lm_head.weight": matrix(random, columns, hidden),
        "d2t": torch.tensor(ids) - torch.arange(columns),
        "t2d": kept,
    }


def llama_config(hidden: int, columns: int, vocabulary: int, **changes: Any) -> dict[str, Any]:
    """The configuration beside them."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "vocab_size": vocabulary,
        "draft_vocab_size": columns,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **changes,
    }


def speculators(config: dict[str, Any], tensors: Tensors, **options: Any) -> tuple[dict[str, Any], Tensors]:
    """The same head as vllm-project/speculators writes it."""
    layer = {name: value for name, value in config.items() if name not in ("draft_vocab_size", "architectures")}
    named = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere"}},
        "transformer_layer_config": layer,
        **options,
    }, named


def save_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate float32 [rows, heads, head_size], halves as pairs."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def run_layer(layer: Tensors, normed: Tensor, residual: Tensor, first: int = 0, theta: float = 500.0) -> Tensor:
    """One decoder layer over all rows at once, [rows, hidden], positions from ``first`` on."""
    rows = len(normed)
    positions = torch.arange(first, first + rows)
    query = (normed @ layer["self_attn.q_proj.weight"].T).view(rows, HEADS, HEAD_SIZE)
    key = (normed @ layer["self_attn.k_proj.weight"].T).view(rows, KV_HEADS, HEAD_SIZE)
    value = (normed @ layer["self_attn.v_proj.weight"].T).view(rows, KV_HEADS, HEAD_SIZE)
    if "self_attn.q_norm.weight" in layer:
        query, key = (rms_norm(x, layer[f"self_attn.{n}_norm.weight"]) for x, n in ((query, "q"), (key, "k")))
    query, key = (rotated(x, positions, theta) for x in (query, key))
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_SIZE**0.5
    scores = scores + torch.full((rows, rows), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(rows, -1)
    stream = residual + attended @ layer["self_attn.o_proj.weight"].T
    normed = rms_norm(stream, layer["post_attention_layernorm.weight"])
    gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return stream + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def as_array(x: Tensor) -> np.ndarray:
    return x.detach().numpy()
