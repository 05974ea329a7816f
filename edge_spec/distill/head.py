"""The head: one decoder layer that reads the target's hidden states (EAGLE-3, Li et al. 2025).

Row t reads a pair, the feature of token t and the embedding of token t + 1, and tells what token t + 2 may be. The
feature is the target's fused hidden states where it has read token t, else the head's own output of the row before.

Tensors are float32, or under autocast what that makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_spec.distill.decoder_parts import GatedMlp, Norm, Rotation
from edge_spec.export.rope import Rope


@dataclass(frozen=True)
class HeadConfig:
    """The sizes of a head.

    Attributes:
        hidden_size: of the target and of the head.
        vocabulary_size: rows of the target's lm_head.
        draft_vocabulary_size: ids that the head proposes.
        tap_layers: after how many layers of the target each tap is taken.
        context_length: positions that are told apart.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    rope_theta: float
    vocabulary_size: int
    draft_vocabulary_size: int
    tap_layers: tuple[int, ...]
    context_length: int


class Attention(nn.Module):
    """The projections of attention; queries, keys and values come from two vectors side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, size = 2 * config.hidden_size, config.head_size
        self.q_proj = nn.Linear(width, config.heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.heads * size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.hidden_norm = Norm(config.hidden_size, config.norm_epsilon)
        self.input_layernorm = Norm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_epsilon)


class Head(nn.Module):
    """The head's weights, under the names of its checkpoint, and the pieces of its forward pass.

    The pieces are apart since attention is another at training than at inference.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(config.hidden_size, config.norm_epsilon)
        self.rotate = Rotation(Rope(config.rope_theta, config.head_size), config.context_length)

    def pairs(self, features: Tensor, embedded: Tensor) -> Tensor:
        """What attention reads: [rows, 2 * hidden], from two times [rows, hidden]."""
        return torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(features)), dim=-1)

    def queries(self, pairs: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries, [rows, heads, head_size]."""
        projected = self.midlayer.self_attn.q_proj(pairs).unflatten(1, (self.config.heads, self.config.head_size))
        rotated: Tensor = self.rotate(projected, positions)
        return rotated

    def keys_and_values(self, pairs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, each [rows, kv_heads, head_size]."""
        shape = self.config.kv_heads, self.config.head_size
        keys, values = self.midlayer.self_attn.k_proj(pairs), self.midlayer.self_attn.v_proj(pairs)
        return self.rotate(keys.unflatten(1, shape), positions), values.unflatten(1, shape)

    def outputs(self, features: Tensor, attended: Tensor) -> Tensor:
        """The features of the next row, [rows, hidden].

        Args:
            features: [rows, hidden], as given to :meth:`pairs`.
            attended: [rows, heads * head_size], what attention gave.
        """
        stream = features + self.midlayer.self_attn.o_proj(attended)
        result: Tensor = stream + self.midlayer.mlp(self.midlayer.post_attention_layernorm(stream))
        return result
