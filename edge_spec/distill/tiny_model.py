"""A tiny draft model: a few decoder layers of the target's own shape, for several texts at once.

Embedding and lm_head are the target's and stay what they are, so they are no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_spec.distill.decoder_parts import GatedMlp, Norm, Rotation
from edge_spec.export.architecture import Architecture

# Model types of config.json that have the shapes here, by family.
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Attention(nn.Module):
    """Causal attention within each of several texts."""

    def __init__(self, facts: Architecture) -> None:
        super().__init__()
        hidden, size = facts.hidden_size, facts.head_size
        self.shape, self.kv_shape = (facts.heads, size), (facts.kv_heads, size)
        self.q_proj = nn.Linear(hidden, facts.heads * size, bias=facts.qkv_bias)
        self.k_proj = nn.Linear(hidden, facts.kv_heads * size, bias=facts.qkv_bias)
        self.v_proj = nn.Linear(hidden, facts.kv_heads * size, bias=facts.qkv_bias)
        self.o_proj = nn.Linear(facts.heads * size, hidden, bias=False)
        if facts.qk_norm:
            self.q_norm, self.k_norm = Norm(size, facts.norm_epsilon), Norm(size, facts.norm_epsilon)
        self.is_normed = facts.qk_norm

    def forward(
        self,
        values: Tensor,
        positions: Tensor,
        rotation: Rotation,
        lengths: Sequence[int],
        wanted: Sequence[int],
        kept: Tensor,
    ) -> Tensor:
        """What attention adds, float32 [kept, hidden]; the arguments are those of :meth:`TinyLayer.forward`."""
        queries = self.q_proj(values[kept]).unflatten(1, self.shape)
        keys, added = (project(values).unflatten(1, self.kv_shape) for project in (self.k_proj, self.v_proj))
        if self.is_normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotation(queries, positions[kept]), rotation(keys, positions)
        of_texts = zip(
            torch.split(queries, list(wanted)),
            torch.split(keys, list(lengths)),
            torch.split(added, list(lengths)),
            strict=True,
        )
        attended = torch.cat([attend(*of_text) for of_text in of_texts])
        result: Tensor = self.o_proj(attended)
        return result


class TinyLayer(nn.Module):
    """One decoder layer; its weights have the names of its checkpoint."""

    def __init__(self, facts: Architecture) -> None:
        super().__init__()
        self.self_attn = Attention(facts)
        self.mlp = GatedMlp(facts.hidden_size, facts.intermediate_size)
        self.input_layernorm = Norm(facts.hidden_size, facts.norm_epsilon)
        self.post_attention_layernorm = Norm(facts.hidden_size, facts.norm_epsilon)

    def forward(
        self,
        stream: Tensor,
        positions: Tensor,
        rotation: Rotation,
        lengths: Sequence[int],
        wanted: Sequence[int],
        kept: Tensor,
    ) -> Tensor:
        """Return the stream behind the layer, of the wanted rows only: float32 [kept, hidden].

        Args:
            stream: float32 [rows, hidden], text behind text.
            positions: int64 [rows], of each row in its text.
            rotation: rotates queries and keys.
            lengths: rows of each text.
            wanted: how many of its last rows are wanted.
            kept: int64 [kept], where those are.
        """
        normed = self.input_layernorm(stream)
        stream = stream[kept] + self.self_attn(normed, positions, rotation, lengths, wanted, kept)
        result: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return result


class TinyModel(nn.Module):
    """The layers and the final norm."""

    def __init__(self, facts: Architecture, positions: int) -> None:
        """Build a model with random weights.

        Args:
            facts: its architecture, one of :data:`CLASSES`, with the same rotary embedding in all layers.
            positions: that are told apart.
        """
        super().__init__()
        self.layers = nn.ModuleList(TinyLayer(facts) for _ in range(facts.layers))
        self.norm = Norm(facts.hidden_size, facts.norm_epsilon)
        self.rotation = Rotation(facts.ropes[0], positions)

    def forward(self, embedded: Tensor, positions: Tensor, lengths: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Return what lm_head reads, of the last ``wanted`` rows of each text: float32 [sum of wanted, hidden].

        Args:
            embedded: float32 [rows, hidden], text behind text.
            positions: int64 [rows], of each row in its text.
            lengths: rows of each text.
            wanted: how many of its last rows are wanted.
        """
        every = torch.arange(len(embedded), device=embedded.device)
        texts = zip(torch.split(every, list(lengths)), wanted, strict=True)
        last = torch.cat([rows[len(rows) - count :] for rows, count in texts])
        stream, depth = embedded, len(self.layers)
        for index, layer in enumerate(self.layers):
            # Rows that nobody asks for are only read by others, and by none behind the last layer.
            counts, kept = (wanted, last) if index == depth - 1 else (lengths, every)
            stream = layer(stream, positions, self.rotation, lengths, counts, kept)
        result: Tensor = self.norm(stream)
        return result


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention within one text.

    Args:
        queries: float32 [wanted, heads, size], of the last rows.
        keys: float32 [rows, kv_heads, size].
        values: as the keys.

    Returns:
        float32 [wanted, heads * size].
    """
    wanted, heads, _ = queries.shape
    rows, kv_heads, _ = keys.shape
    keys, values = (part.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for part in (keys, values))
    seen = None
    if wanted < rows:
        seen = torch.ones(wanted, rows, dtype=torch.bool, device=keys.device).tril_(rows - wanted)
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys, values, attn_mask=seen, is_causal=seen is None
    )
    return mixed.transpose(0, 1).flatten(1)
