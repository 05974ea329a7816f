"""The decoder layer of a head, read under the names that a Hugging Face decoder gives its tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_spec.errors import UnsupportedError
from edge_spec.export.architecture import Architecture, LayerAttention
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.heads.head_config import HeadSizes
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.manifest import Manifest

_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_PROJECTIONS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def read_head_layer(
    tensors: HeadTensors,
    sizes: HeadSizes,
    manifest: Manifest,
    inputs: int,
    input_norm: str,
    gain: float = 0.0,
    others: tuple[str, ...] = (),
) -> tuple[DecoderLayer, Callable[[int], Architecture]]:
    """Read the layer.

    Args:
        tensors: of the layer.
        sizes: of it.
        manifest: of the target's bundle.
        inputs: how wide that is which q, k and v project.
        input_norm: what the norm before attention is called.
        gain: what is added to stored gains of norms.
        others: how the names of tensors begin that lie there too.

    Returns:
        The layer, and the architecture by how many columns the head's logits have.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedError: there is a tensor that such a layer does not have.
    """
    hidden, mlp = sizes.hidden, sizes.intermediate
    query, kv = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    shapes = {"q": (query, inputs), "k": (kv, inputs), "v": (kv, inputs)}

    def norm(name: str, size: int) -> Float32Array:
        return tensors.read(f"{name}.weight", size) + np.float32(gain)

    def stack(names: dict[str, tuple[int, int]]) -> Float32Array:
        return np.concatenate([tensors.read(f"{name}.weight", *shape) for name, shape in names.items()])

    def biases(names: dict[str, tuple[int, int]]) -> Float32Array | None:
        if not any(f"{name}.bias" in tensors for name in names):
            return None
        return np.concatenate([tensors.read(f"{name}.bias", shape[0]) for name, shape in names.items()])

    qkv = {f"self_attn.{part}_proj": shape for part, shape in shapes.items()}
    output = {"self_attn.o_proj": (hidden, query)}
    gate_up = {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    down = {"mlp.down_proj": (hidden, mlp)}
    has_norms = "self_attn.q_norm.weight" in tensors
    _refuse_unknown(tensors, others)
    layer = DecoderLayer(
        input_norm=norm(input_norm, hidden),
        qkv=stack(qkv),
        qkv_bias=biases(qkv),
        q_norm=norm("self_attn.q_norm", sizes.head_size) if has_norms else None,
        k_norm=norm("self_attn.k_norm", sizes.head_size) if has_norms else None,
        output=stack(output),
        output_bias=biases(output),
        post_attention_norm=None,
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=stack(gate_up),
        gate_up_bias=biases(gate_up),
        down=stack(down),
        down_bias=biases(down),
        post_mlp_norm=None,
    )

    def architecture(columns: int) -> Architecture:
        return Architecture(
            family="llama",
            hidden_size=hidden,
            intermediate_size=mlp,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            logits_size=columns,
            # As many as its target: a head is rotated to wherever its target writes.
            context_length=manifest.context_length,
            norm_epsilon=sizes.norm_epsilon,
            attention=(LayerAttention(sizes.rope),),
            tied_embeddings=False,
            qkv_bias=layer.qkv_bias is not None,
            output_bias=layer.output_bias is not None,
            mlp_bias=layer.gate_up_bias is not None,
            qk_norm=has_norms,
            embedding_rows=manifest.target.architecture.readable_ids,
        )

    return layer, architecture


def _refuse_unknown(tensors: HeadTensors, others: tuple[str, ...]) -> None:
    known = {f"{name}.weight" for name in (*_NORMS, *_PROJECTIONS)} | {f"{name}.bias" for name in _PROJECTIONS}
    for name in tensors.names():
        if name not in known and not name.endswith("rotary_emb.inv_freq") and not name.startswith(others):
            raise UnsupportedError(
                f"{tensors.source}: the head's layer holds {name!r}, which no dense layer has; mixtures of experts and "
                "latent attention are not supported"
            )
