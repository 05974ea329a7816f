"""What decoder layers are made of, whoever drafts with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_spec.export.rope import Rope, rotary_tables


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        """Norm [..., size], in float32."""
        return functional.rms_norm(values.float(), self.weight.shape, self.weight, self.epsilon)


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Map float32 [rows, hidden] to the same shape."""
        mapped: Tensor = self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))
        return mapped


class Rotation(nn.Module):
    """Rotary embedding by tables, which are no weights."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, rope: Rope, positions: int) -> None:
        super().__init__()
        cosines, sines = rotary_tables(rope, positions)
        self.register_buffer("cosines", torch.from_numpy(cosines)[:, None], persistent=False)
        self.register_buffer("sines", torch.from_numpy(sines)[:, None], persistent=False)

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:
        """Rotate float32 [rows, heads, head_size], each row by its position, int64 [rows]."""
        cosines, sines = self.cosines[positions], self.sines[positions]
        first, second = values.chunk(2, dim=-1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
