"""A recurrent head rewritten so that it computes the same beside a rotated target, and loses less when it is rounded.

See :mod:`edge_spec.export.rotation`. An embedding that the target stores rotated is read through a norm, whose gain and
the rotation go into the weights behind it. The head's own residual stream can be rotated like a decoder's where nothing
but such weights, and the head's own next step, read it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.heads.recurrent_head import RecurrentHead
from edge_spec.export.recipe import Recipe
from edge_spec.export.rotation import Rotation


def reading_rotated_embedding(head: RecurrentHead, rotation: Rotation) -> RecurrentHead:
    """Let a head read an embedding whose rows are rotated."""
    size = head.architecture.hidden_size

    def reading(weight: Float32Array) -> Float32Array:
        return np.concatenate([rotation.rows(weight[:, :size], head.embedding_norm), weight[:, size:]], axis=1)

    ones = np.ones_like(head.embedding_norm)
    if head.join is not None:
        return replace(head, join=reading(head.join), embedding_norm=ones)
    weights = replace(head.layer.weights, qkv=reading(head.layer.weights.qkv))
    return replace(head, layer=replace(head.layer, weights=weights), embedding_norm=ones)


def with_rotated_stream(head: RecurrentHead, recipe: Recipe) -> RecurrentHead:
    """Rotate a head's residual stream, and so its features, where a format profits and the head's design allows it.

    What a norm with a gain gives must not enter the stream, nor what the target tells as it is. Of a head that joins
    its pairs the hidden states alone are rotated, in the graph.
    """
    if head.join is not None and recipe.attention == "w8a8":
        size = head.architecture.hidden_size
        rotation = Rotation(size)
        hidden = rotation.rows(head.join[:, size:], head.hidden_norm)
        joining = np.concatenate([head.join[:, :size], hidden], axis=1)
        return replace(head, join=joining, hidden_norm=np.ones_like(head.hidden_norm), hidden_rotation=rotation)
    matrices = (recipe.attention, recipe.mlp_up, recipe.mlp_down, recipe.lm_head)
    gains = head.normed_feature or head.layer.normed_residual
    if "w8a8" not in matrices or gains or head.fuse is None or head.lm_head is None or not head.layer.reads_pairs:
        return head
    size = head.architecture.hidden_size
    rotation, layer = Rotation(size), head.layer.weights

    def writing(bias: Float32Array | None) -> Float32Array | None:
        return None if bias is None else rotation.rows(bias[None])[0]

    rotated = replace(
        layer,
        input_norm=np.ones_like(layer.input_norm),
        qkv=np.concatenate([layer.qkv[:, :size], rotation.rows(layer.qkv[:, size:], head.hidden_norm)], axis=1),
        output=rotation.columns(layer.output),
        output_bias=writing(layer.output_bias),
        mlp_norm=np.ones_like(layer.mlp_norm),
        gate_up=rotation.rows(layer.gate_up, layer.mlp_norm),
        down=rotation.columns(layer.down),
        down_bias=writing(layer.down_bias),
    )
    return replace(
        head,
        fuse=rotation.columns(head.fuse),
        hidden_norm=np.ones_like(head.hidden_norm),
        layer=replace(head.layer, weights=rotated),
        final_norm=np.ones_like(head.final_norm),
        lm_head=rotation.rows(head.lm_head, head.final_norm),
    )
