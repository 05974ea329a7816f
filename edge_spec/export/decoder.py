"""The weights of one decoder layer in float32, read from a checkpoint and fused the way the graph runs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.export.checkpoint import Checkpoint

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; matrices are float32 [out, in], vectors float32 [out].

    Attributes:
        input_norm, mlp_norm: RMS norm gains before attention and before the MLP.
        qkv: q, k and v stacked along the output. Shape ``[(heads + 2 * kv_heads) * head_size, hidden]``.
        output: attention output projection ``[hidden, heads * head_size]``.
        gate_up: gate and up projections stacked along the output ``[2 * intermediate, hidden]``.
        down: ``[hidden, intermediate]``.
    """

    input_norm: Float32Array
    qkv: Float32Array
    qkv_bias: Float32Array | None
    output: Float32Array
    output_bias: Float32Array | None
    mlp_norm: Float32Array
    gate_up: Float32Array
    gate_up_bias: Float32Array | None
    down: Float32Array
    down_bias: Float32Array | None


def read_layer(checkpoint: Checkpoint, index: int) -> DecoderLayer:
    """Read layer ``index`` (0-based). Raises CheckpointError if a tensor is missing or has the wrong shape."""
    prefix = f"layers.{index}."
    facts = checkpoint.architecture

    def stack(names: tuple[str, ...], kind: str) -> Float32Array:
        parts = [checkpoint.tensor(f"{prefix}{name}.{kind}") for name in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def projection(*names: str, bias: bool) -> tuple[Float32Array, Float32Array | None]:
        return stack(names, "weight"), stack(names, "bias") if bias else None

    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    qkv, qkv_bias = projection(*attention, bias=facts.qkv_bias)
    output, output_bias = projection("self_attn.o_proj", bias=facts.output_bias)
    gate_up, gate_up_bias = projection("mlp.gate_proj", "mlp.up_proj", bias=facts.mlp_bias)
    down, down_bias = projection("mlp.down_proj", bias=facts.mlp_bias)
    return DecoderLayer(
        input_norm=checkpoint.tensor(prefix + "input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        output=output,
        output_bias=output_bias,
        mlp_norm=checkpoint.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )
