"""Random Medusa heads in the published layout, and what they say, by torch alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def random_heads(
    heads: int, layers: int, hidden: int, vocab: int, seed: int = 3, spread: float = 1.4
) -> dict[str, torch.Tensor]:
    """Tensors of random heads by their published names."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = noise(hidden, hidden) * (1.2 / hidden**0.5)
            tensors[f"{head}.{layer}.linear.bias"] = noise(hidden) * 0.3
        tensors[f"{head}.{layers}.weight"] = noise(vocab, hidden) * (spread / hidden**0.5)
    return tensors


def save_heads(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    prefix: str = "",
    file: str = "medusa_lm_head.safetensors",
    **config: Any,
) -> Path:
    """Write a folder of heads, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / file))
    return folder


class ReferenceHeads(torch.nn.Module):
    """The heads as their authors wrote them down: residual blocks, then a linear map onto the vocabulary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], heads: int, layers: int) -> None:
        super().__init__()
        hidden = tensors["0.0.linear.bias"].shape[0]
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(heads)
        )
        self.maps = torch.nn.ModuleList(
            torch.nn.Linear(hidden, tensors[f"{head}.{layers}.weight"].shape[0], bias=False) for head in range(heads)
        )
        with torch.no_grad():
            for head in range(heads):
                for layer in range(layers):
                    self.blocks[head][layer].weight.copy_(tensors[f"{head}.{layer}.linear.weight"])
                    self.blocks[head][layer].bias.copy_(tensors[f"{head}.{layer}.linear.bias"])
                self.maps[head].weight.copy_(tensors[f"{head}.{layers}.weight"])

    @torch.no_grad()
    def forward(self, states: torch.Tensor) -> np.ndarray:
        """Logits float32 [heads, tokens, vocab] from hidden states float32 [tokens, hidden] behind the final norm."""
        told = []
        for blocks, linear in zip(self.blocks, self.maps, strict=True):
            x = states
            for block in blocks:
                x = x + torch.nn.functional.silu(block(x))
            told.append(linear(x))
        return torch.stack(told).numpy()
