"""The weights that a head starts with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from edge_spec.distill.head import Head, HeadConfig
from edge_spec.export.checkpoint import Checkpoint
from edge_spec.export.decoder import read_final_norm, read_layer

_ROWS_AT_ONCE = 4096
_SPREAD = 0.02


def read_embedding(checkpoint: Checkpoint) -> Tensor:
    """The target's embedding, float16 [vocabulary, hidden]."""
    facts = checkpoint.architecture
    rows = facts.embedding_rows or facts.logits_size
    embedding = torch.empty(rows, facts.hidden_size, dtype=torch.float16)
    for start in range(0, rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, rows)
        embedding[start:stop] = torch.from_numpy(checkpoint.rows("embed_tokens.weight", start, stop))
    return embedding


def head_config(
    checkpoint: Checkpoint, tap_layers: tuple[int, ...], draft_vocabulary_size: int, intermediate_size: int | None
) -> HeadConfig:
    """The sizes of a head for a target."""
    facts = checkpoint.architecture
    return HeadConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=intermediate_size or facts.intermediate_size,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_size=facts.head_size,
        norm_epsilon=facts.norm_epsilon,
        rope_theta=facts.ropes[0].theta if facts.ropes else 10_000.0,
        vocabulary_size=facts.logits_size,
        draft_vocabulary_size=draft_vocabulary_size,
        tap_layers=tap_layers,
        context_length=facts.context_length,
    )


def initial_head(
    checkpoint: Checkpoint,
    config: HeadConfig,
    start: Literal["target", "random"],
    seed: int,
) -> Head:
    """A head to start with.

    Args:
        checkpoint: the target.
        config: the head's sizes.
        start: ``target`` for the target's last layer, which reads the last tap; ``random`` for random matrices.
        seed: of what is random.
    """
    head = Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _SPREAD, generator=generator)
        head.norm.weight.copy_(torch.from_numpy(read_final_norm(checkpoint)))
        if start == "target":
            _take_last_layer(head, checkpoint)
    return head


def _take_last_layer(head: Head, checkpoint: Checkpoint) -> None:
    config = head.config
    layer = read_layer(checkpoint, checkpoint.architecture.layers - 1)
    attention, mlp, hidden = head.midlayer.self_attn, head.midlayer.mlp, config.hidden_size
    # The last tap goes through; the others are learnt. So is what attention reads of the next token.
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    row = 0
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:, hidden:] = torch.from_numpy(layer.qkv[row : row + len(projection.weight)])
        row += len(projection.weight)
    attention.o_proj.weight.copy_(torch.from_numpy(layer.output))
    gate, up = torch.from_numpy(layer.gate_up).chunk(2)
    down = torch.from_numpy(layer.down)
    # Where the head's MLP is narrower, it has those channels that can do most.
    reach = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    channels = reach.argsort(descending=True, stable=True)[: config.intermediate_size].sort().values
    taken = slice(0, len(channels))
    mlp.gate_proj.weight[taken] = gate[channels]
    mlp.up_proj.weight[taken] = up[channels]
    mlp.down_proj.weight[:, taken] = down[:, channels]
    head.midlayer.hidden_norm.weight.copy_(torch.from_numpy(layer.input_norm))
    head.midlayer.post_attention_layernorm.weight.copy_(torch.from_numpy(layer.mlp_norm))
