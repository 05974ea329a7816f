"""The weights of one decoder layer in float32, read from a checkpoint and fused the way the graph runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Checkpoint

Float32Array = npt.NDArray[np.float32]


class LayerSource(Protocol):
    """What decoder layers are read from: a checkpoint, or a head whose layers are named alike."""

    architecture: Architecture

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32, an array of the caller's own."""
        ...


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; matrices are float32 [out, in], vectors float32 [out].

    Attributes:
        input_norm, mlp_norm: RMS norm gains before attention and before the MLP.
        qkv: q, k and v stacked along the output. Shape ``[(heads + 2 * kv_heads) * head_size, hidden]``.
        q_norm, k_norm: gains of the norms of each head's query and key, ``[head_size]``; ``None`` without.
        output: attention output projection ``[hidden, heads * head_size]``.
        post_attention_norm, post_mlp_norm: gains of the norms of what attention and MLP give; ``None`` without.
        gate_up: gate and up projections stacked along the output ``[2 * intermediate, hidden]``.
        down: ``[hidden, intermediate]``.
    """

    input_norm: Float32Array
    qkv: Float32Array
    qkv_bias: Float32Array | None
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    output: Float32Array
    output_bias: Float32Array | None
    post_attention_norm: Float32Array | None
    mlp_norm: Float32Array
    gate_up: Float32Array
    gate_up_bias: Float32Array | None
    down: Float32Array
    down_bias: Float32Array | None
    post_mlp_norm: Float32Array | None


def read_layer(checkpoint: LayerSource, index: int) -> DecoderLayer:
    """Read layer ``index`` (0-based). Raises CheckpointError if a tensor is missing or has the wrong shape."""
    prefix = f"layers.{index}."
    facts = checkpoint.architecture

    def stack(names: tuple[str, ...], kind: str) -> Float32Array:
        parts = [checkpoint.tensor(f"{prefix}{name}.{kind}") for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def projection(*names: str, bias: bool, scale: float = 1.0) -> tuple[Float32Array, Float32Array | None]:
        weight, added = stack(names, "weight"), stack(names, "bias") if bias else None
        if scale != 1.0:
            weight, added = weight * np.float32(scale), None if added is None else added * np.float32(scale)
        return weight, added

    def gain(name: str) -> Float32Array:
        return checkpoint.tensor(f"{prefix}{name}.weight")

    attention = ("self_attn.qkv_proj",) if facts.fused_projections else tuple(f"self_attn.{x}_proj" for x in "qkv")
    gated = ("mlp.gate_up_proj",) if facts.fused_projections else ("mlp.gate_proj", "mlp.up_proj")
    qkv, qkv_bias = projection(*attention, bias=facts.qkv_bias)
    output, output_bias = projection("self_attn.o_proj", bias=facts.output_bias, scale=facts.residual_scale)
    gate_up, gate_up_bias = projection(*gated, bias=facts.mlp_bias)
    down, down_bias = projection("mlp.down_proj", bias=facts.mlp_bias, scale=facts.residual_scale)
    return DecoderLayer(
        input_norm=gain("input_layernorm"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=gain("self_attn.q_norm") if facts.qk_norm else None,
        k_norm=gain("self_attn.k_norm") if facts.qk_norm else None,
        output=output,
        output_bias=output_bias,
        # Without norms behind the sublayers, this is the name of the one before the MLP.
        post_attention_norm=gain("post_attention_layernorm") if facts.post_norms else None,
        mlp_norm=gain("pre_feedforward_layernorm" if facts.post_norms else "post_attention_layernorm"),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        post_mlp_norm=gain("post_feedforward_layernorm") if facts.post_norms else None,
    )


def read_final_norm(checkpoint: Checkpoint) -> Float32Array:
    """Return the gain of the norm before lm_head, float32 [hidden], which also carries the scale of the logits."""
    return checkpoint.tensor("norm.weight") * np.float32(checkpoint.architecture.logits_scale)
