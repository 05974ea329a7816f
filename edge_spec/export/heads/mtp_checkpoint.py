"""Reads the multi-token prediction layer that a model was published with (docs/heads.md).

Such a layer reads the target's last hidden state behind the target's final norm, and shares its lm_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.family import FAMILIES
from edge_spec.export.heads.head_config import read_sizes
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.head_layer import read_head_layer
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.heads.recurrent_head import HeadLayer, OwnEmbedding, RecurrentHead
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.export.huggingface_config import text_config
from edge_spec.export.metadata import Metadata
from edge_spec.manifest import Manifest

# Families that store how far gains are from one.
_GAINS_FROM_ONE = ("qwen3_next", "qwen3_5")
_TARGET_NORMS = ("model.norm.weight", "model.language_model.norm.weight")
_TARGET_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_COMPARED_ROWS = 64


@dataclass(frozen=True)
class _Layout:
    """Under which names a layer is published.

    Attributes:
        prefix: of everything; ``{layers}`` is the number of the target's layers.
        layer: of the decoder layer, behind the prefix.
        embedding_norm, hidden_norm, join, final_norm: the other tensors, behind the prefix.
        hidden_first: whether the hidden state comes before the embedding where they are joined.
        normed_feature: whether the next token is drafted from what the final norm gives.
        own: names, behind the prefix, of copies of the embedding and of lm_head.
    """

    prefix: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    hidden_first: bool = False
    normed_feature: bool = True
    own: tuple[str, str] = ("embed_tokens.weight", "lm_head.weight")


_LAYOUTS = (
    # DeepSeek-V3 and those after its pattern.
    _Layout(
        *("model.layers.{layers}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        normed_feature=False,
        own=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    # Qwen3-Next.
    _Layout("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    # MiMo.
    _Layout(
        *("model.mtp_layers.0.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
)


def is_mtp(tensors: HeadTensors, layers: int) -> bool:
    """Whether a checkpoint holds such a layer behind so many of its own."""
    return _layout(tensors, layers) is not None


def read_mtp(
    folder: HeadFolder, manifest: Manifest, taps: Sequence[int] | None, final_norm: Float32Array | None
) -> RecurrentHead:
    """Read the layer for the target of a bundle.

    Args:
        folder: the checkpoint, of the whole model or of the layer alone.
        manifest: of the bundle.
        taps: ``None``, or the number of the target's layers alone.
        final_norm: gain [D] of the target's final norm, if the bundle has it.

    Raises:
        CheckpointError: something is missing, damaged or does not fit the target.
        UnsupportedError: the layer is of a kind that is not built.
    """
    config, target = text_config(folder.config), manifest.target.architecture
    layout = _layout(folder.tensors, target.layers)
    assert layout is not None  # by this it was known for one
    if taps is not None and tuple(taps) != (target.layers,):
        raise CheckpointError(
            f"{folder.config.where}: a multi-token prediction layer reads what is behind all {target.layers} layers, "
            f"but the taps (--taps) are {list(taps)}; leave them out"
        )
    _refuse_other_kinds(config, manifest)
    tensors = folder.tensors.under(layout.prefix.format(layers=target.layers))
    sizes = read_sizes(config, manifest)
    hidden = sizes.hidden
    if hidden != target.hidden_size:
        raise UnsupportedError(
            f"{config.where}: 'hidden_size' is {hidden}, but the target's is {target.hidden_size}; is it the target's?"
        )
    more = (layout.embedding_norm, layout.hidden_norm, layout.join, layout.final_norm, "shared_head", "embed_tokens")
    gain = 1.0 if config.text("model_type", "").startswith(_GAINS_FROM_ONE) else 0.0
    layer, architecture = read_head_layer(
        tensors.under(layout.layer), sizes, manifest, hidden, "input_layernorm", gain, () if layout.layer else more
    )
    _refuse_more_layers(tensors, layout, more)

    def norm(name: str) -> Float32Array:
        return tensors.read(f"{name}.weight", hidden) + np.float32(gain)

    join = tensors.read(f"{layout.join}.weight", hidden, 2 * hidden)
    if layout.hidden_first:
        join = np.concatenate([join[:, hidden:], join[:, :hidden]], axis=1)
    lm_head = _own_lm_head(folder.tensors, tensors, layout.own[1], hidden)
    if final_norm is None:
        final_norm = _final_norm(folder.tensors, manifest, hidden, gain)
    head = RecurrentHead(
        kind="mtp",
        source=folder.source,
        sha256=folder.sha256(),
        architecture=architecture(target.logits_size if lm_head is None else len(lm_head)),
        taps=(target.layers,),
        tap_norm=final_norm,
        fuse=None,
        embedding_norm=norm(layout.embedding_norm),
        hidden_norm=norm(layout.hidden_norm),
        join=join,
        layer=HeadLayer(layer, reads_pairs=False),
        final_norm=norm(layout.final_norm),
        normed_feature=layout.normed_feature,
        lm_head=lm_head,
        ids=None,
        embedding=None,
    )
    if layout.own[0] not in tensors:
        return head
    rows = tensors.rows_of(layout.own[0])
    read = OwnEmbedding(rows, lambda start, stop: tensors.read_rows(layout.own[0], start, stop, rows, hidden))
    return replace(head, embedding=read)


def _layout(tensors: HeadTensors, layers: int) -> _Layout | None:
    names = ((layout, layout.prefix.format(layers=layers) + f"{layout.join}.weight") for layout in _LAYOUTS)
    return next((layout for layout, name in names if name in tensors), None)


def _refuse_other_kinds(config: Metadata, manifest: Manifest) -> None:
    for name in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        if config.get(name) not in (None, 0, 1):
            raise UnsupportedError(f"{config.where}: {name!r} is {config[name]!r}; supported is one layer")
    if config.get("attn_output_gate"):
        raise UnsupportedError(f"{config.where}: 'attn_output_gate' is set, gated attention, which is not supported")
    family = next((family for family in FAMILIES if family.name == manifest.target.architecture.family), None)
    if family is not None and family.multipliers:
        raise UnsupportedError(f"{config.where}: a {family.name} scales its logits, which such a layer does not")


def _refuse_more_layers(tensors: HeadTensors, layout: _Layout, more: Sequence[str]) -> None:
    if not layout.layer:
        return
    for name in tensors.names():
        if not name.startswith((layout.layer, *more)) and name not in layout.own:
            raise UnsupportedError(
                f"{tensors.source}: the weights hold {name!r} beside the layer, but supported is one dense layer"
            )


def _own_lm_head(folder: HeadTensors, tensors: HeadTensors, name: str, hidden: int) -> Float32Array | None:
    """The layer's lm_head, if it came with one that is not the target's."""
    if name not in tensors:
        return None
    rows = tensors.rows_of(name)
    places = np.linspace(0, rows - 1, min(rows, _COMPARED_ROWS)).astype(int).tolist()
    other = next((other for other in _TARGET_HEADS if other in folder), None)
    if (
        other is not None
        and folder.rows_of(other) == rows
        and all(
            np.array_equal(
                tensors.read_rows(name, row, row + 1, rows, hidden), folder.read_rows(other, row, row + 1, rows, hidden)
            )
            for row in places
        )
    ):
        return None
    return tensors.read(name, rows, hidden)


def _final_norm(folder: HeadTensors, manifest: Manifest, hidden: int, gain: float) -> Float32Array:
    """The gain of the target's final norm: of the same checkpoint, else of the one that the target was made of."""
    name = next((name for name in _TARGET_NORMS if name in folder), None)
    if name is not None:
        return folder.read(name, hidden) + np.float32(gain)
    return checkpoint_of(manifest.target, "final norm").tensor("norm.weight")
