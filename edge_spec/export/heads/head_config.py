"""The sizes that a head's configuration names, and what asks for a kind of head that is not built."""

from __future__ import annotations

from dataclasses import dataclass

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.config_check import refuse_other_kinds, refuse_quantized
from edge_spec.export.metadata import Metadata
from edge_spec.export.rope import Rope
from edge_spec.export.rope_scaling import rope_from_config
from edge_spec.manifest import Manifest
from edge_spec.manifest_check import LARGEST_SIZES

_SILU = ("silu", "swish")


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a head's layer; names as in :class:`~edge_spec.export.architecture.Architecture`."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    rope: Rope


def read_sizes(config: Metadata, manifest: Manifest, layers: int = 1) -> HeadSizes:
    """Return the sizes of a head's layer.

    Args:
        config: of the layer.
        manifest: of the target's bundle, whose context decides the rotary embedding's.
        layers: that the head has.

    Raises:
        CheckpointError: a size is missing or out of its range.
        UnsupportedError: the configuration asks for a kind of head that is not built.
    """
    where = config.where
    refuse_quantized(config)
    refuse_other_kinds(config, allowed=("num_nextn_predict_layers", "num_mtp_layers"))
    if layers != 1:
        raise UnsupportedError(f"{where}: the head has {layers} layers; supported are heads of one")
    if config.text("hidden_act", "silu") not in _SILU:
        raise UnsupportedError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; expected silu")
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") or (isinstance(kinds, list) and "sliding_attention" in kinds[:1]):
        raise UnsupportedError(f"{where}: the head's layer sees a window of tokens; supported are heads that see all")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    sizes = HeadSizes(
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_size=config.integer("head_dim", max(1, hidden // heads)),
        norm_epsilon=config.number("rms_norm_eps"),
        rope=Rope(1e4, 2),
    )
    named = {"hidden_size": hidden, "intermediate_size": sizes.intermediate, "heads": heads}
    for name, size in (*named.items(), ("kv_heads", sizes.kv_heads), ("head_size", sizes.head_size)):
        if size > LARGEST_SIZES[name]:
            raise CheckpointError(f"{where}: {name} is {size}, expected at most {LARGEST_SIZES[name]}")
    if heads % sizes.kv_heads:
        raise CheckpointError(f"{where}: {heads} heads cannot share {sizes.kv_heads} key-value heads")
    rope = rope_from_config(config, sizes.head_size, manifest.context_length)
    if sizes.head_size % 16 or rope.size % 16:
        raise UnsupportedError(
            f"{where}: {rope.size} elements of heads of {sizes.head_size} are to be rotated; supported are multiples "
            "of 16"
        )
    return HeadSizes(**{**sizes.__dict__, "rope": rope})
