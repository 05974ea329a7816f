"""Reads EAGLE-3 heads (Li et al. 2025) in the layouts they are published in (docs/heads.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.graph_taps import eagle3_taps
from edge_spec.export.heads.draft_columns import DraftColumns, columns_of
from edge_spec.export.heads.head_config import read_sizes
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.head_layer import read_head_layer
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.heads.recurrent_head import HeadLayer, OwnEmbedding, RecurrentHead
from edge_spec.export.heads.target_checkpoint import checkpoint_of
from edge_spec.export.lm_head_rows import lm_head_rows
from edge_spec.export.metadata import Metadata
from edge_spec.manifest import Manifest, ModelRecord

# Where the layer lies: SafeAILab and SpecForge, speculators.
_LAYERS = ("midlayer.", "layers.0.")
# What belongs to training or to the target.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(config: Metadata, tensors: HeadTensors) -> bool:
    """Whether a checkpoint is such a head."""
    named = config.get("speculators_model_type")
    if named is not None:
        return bool(named == "eagle3")
    return "fc.weight" in tensors and any(f"{layer}hidden_norm.weight" in tensors for layer in _LAYERS)


def read_eagle3(folder: HeadFolder, manifest: Manifest, taps: Sequence[int] | None) -> RecurrentHead:
    """Read a head for the target of a bundle.

    Args:
        folder: the checkpoint.
        manifest: of the bundle.
        taps: behind how many layers it reads the target, in the order of its weights; ``None`` for what it says.

    Raises:
        CheckpointError: something is missing, damaged or does not fit the target.
        UnsupportedError: the head is of a kind that is not built.
    """
    config, tensors = folder.config, folder.tensors
    target = manifest.target.architecture
    options = _Options(config)
    sizes = read_sizes(options.layer, manifest, options.layer.integer("num_hidden_layers"))
    if sizes.hidden != target.hidden_size:
        raise UnsupportedError(
            f"{config.where}: 'hidden_size' is {sizes.hidden}, but the target's is {target.hidden_size}; supported are "
            "heads as wide as their target"
        )
    prefix = next((layer for layer in _LAYERS if f"{layer}self_attn.q_proj.weight" in tensors), _LAYERS[0])
    layer, architecture = read_head_layer(tensors.under(prefix), sizes, manifest, 2 * sizes.hidden, "hidden_norm")
    if taps is None:
        taps = options.taps(target.layers)
    order = _ascending(taps, target.layers, config.where)
    count = options.columns
    if "lm_head.weight" not in tensors:
        _require_target_rows(tensors, count, manifest)
    columns = columns_of(tensors, count, manifest.vocab_size)
    head = RecurrentHead(
        kind="eagle3",
        source=folder.source,
        sha256=folder.sha256(),
        architecture=architecture(count),
        taps=tuple(int(taps[index]) for index in order),
        tap_norm=_of_taps(options.tap_norm(tensors, len(taps) * sizes.hidden), order),
        fuse=_of_taps(tensors.read("fc.weight", sizes.hidden, len(taps) * sizes.hidden), order),
        embedding_norm=tensors.under(prefix).read("input_layernorm.weight", sizes.hidden),
        hidden_norm=layer.input_norm,
        join=None,
        layer=HeadLayer(layer, reads_pairs=True, normed_residual=options.flag("norm_before_residual")),
        final_norm=tensors.read("norm.weight", sizes.hidden),
        normed_feature=options.flag("norm_output"),
        lm_head=_lm_head(tensors, columns, manifest.target, (count, sizes.hidden)),
        ids=columns.ids,
        embedding=_own_embedding(tensors, target.readable_ids, sizes.hidden),
    )
    _refuse_unknown(tensors, prefix, config.where)
    return head


class _Options:
    """What the configuration says beyond the sizes, in its several places."""

    def __init__(self, config: Metadata) -> None:
        self._config = config
        inner = config.get("transformer_layer_config", config)
        # What the NVIDIA and SGLang tools add to a llama's configuration.
        self._eagle = config.get("eagle_config") or {}
        for name, value in (("transformer_layer_config", inner), ("eagle_config", self._eagle)):
            if not isinstance(value, Mapping):
                raise CheckpointError(f"{config.where}: {name!r} is {value!r}, expected an object")
        self.layer = Metadata({**_LLAMA_DEFAULTS, **{k: v for k, v in inner.items() if v is not None}}, config.where)
        if self._get("fc_norm"):
            raise UnsupportedError(f"{config.where}: 'fc_norm' is set, a norm for each hidden state; not supported")
        if self._eagle.get("use_aux_hidden_state") is False:
            raise UnsupportedError(
                f"{config.where}: 'use_aux_hidden_state' is false, a head on the last hidden state alone; not supported"
            )

    @property
    def columns(self) -> int:
        """Rows of lm_head."""
        size = self._get("draft_vocab_size")
        return self.layer.integer("vocab_size") if size is None else self._config.integer("draft_vocab_size")

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if value not in (None, True, False):
            raise CheckpointError(f"{self._config.where}: {name!r} is {value!r}, expected true or false")
        return bool(value)

    def taps(self, layers: int) -> list[int]:
        """Behind how many of the target's layers each hidden state is taken, in the order of the weights.

        A list of its own counts layers as vLLM and speculators do, which is how many lie before the hidden state. In
        ``eagle_config`` it counts as SGLang does, by the layer that gives it, from 0. Both have the same default.
        """
        listed = self._config.get(_IDS, self._config.get("aux_hidden_state_layer_ids"))
        before = 0
        if listed is None and (listed := self._eagle.get(_IDS)) is not None:
            before = 1
        if not listed:
            return list(eagle3_taps(layers))
        if not isinstance(listed, list) or any(type(value) is not int for value in listed):
            raise CheckpointError(f"{self._config.where}: {_IDS!r} is {listed!r}, expected a list of numbers of layers")
        return [value + before for value in listed]

    def tap_norm(self, tensors: HeadTensors, size: int) -> Float32Array | None:
        return tensors.read("input_norm.weight", size) if self.flag("norm_before_fc") else None

    def _get(self, name: str) -> Any:
        value = self._config.get(name)
        return self._eagle.get(name) if value is None else value


# What speculators leaves out because it is the default of transformers.
_LLAMA_DEFAULTS = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "vocab_size": 32000, "num_hidden_layers": 1}
_LLAMA_DEFAULTS |= {"hidden_size": 4096, "intermediate_size": 11008}


def _ascending(taps: Sequence[int], layers: int, where: str) -> npt.NDArray[np.int64]:
    """The order that makes the taps ascend. Raises CheckpointError if they are not different layers of the target."""
    if len(set(taps)) < len(taps) or any(not 1 <= tap <= layers for tap in taps) or not taps:
        raise CheckpointError(
            f"{where}: the head reads the hidden states behind {list(taps)} of the target's layers, expected different "
            f"numbers from 1 to {layers}; is it a head for this target? If it is, say by taps (--taps) what it reads"
        )
    return np.argsort(taps)


def _of_taps(values: Float32Array | None, order: npt.NDArray[np.int64]) -> Float32Array | None:
    """Put the parts that the last dimension has for each tap into another order."""
    if values is None:
        return None
    parts = values.reshape(*values.shape[:-1], len(order), -1)
    return np.ascontiguousarray(parts[..., order, :].reshape(values.shape))


def _lm_head(tensors: HeadTensors, columns: DraftColumns, target: ModelRecord, shape: tuple[int, int]) -> Float32Array:
    """The rows of lm_head in the order of their ids: the target's where the head came without."""
    name = "lm_head.weight"
    if name in tensors:
        return tensors.read(name, *shape)[columns.order]
    ids = np.arange(shape[0], dtype=np.int64) if columns.ids is None else columns.ids
    return lm_head_rows(checkpoint_of(target, "lm_head"), ids)


def _require_target_rows(tensors: HeadTensors, count: int, manifest: Manifest) -> None:
    """Raise CheckpointError unless it is clear which rows of the target's lm_head the columns are."""
    size = manifest.target.architecture.logits_size
    if count > size:
        raise CheckpointError(
            f"{tensors.source}: the head is to propose {count:,} ids with its target's lm_head, which has {size:,}; is "
            "it a head for this target?"
        )
    if count < manifest.vocab_size and "d2t" not in tensors:
        raise CheckpointError(
            f"{tensors.source}: the head has {count:,} columns of its target's {size:,}, and nothing says which: "
            "expected 'd2t', or an 'lm_head.weight' of its own; is the file whole?"
        )


def _own_embedding(tensors: HeadTensors, readable_ids: int, hidden: int) -> OwnEmbedding | None:
    name = "embed_tokens.weight"
    if name not in tensors:
        return None
    rows = tensors.rows_of(name)
    return OwnEmbedding(rows, lambda start, stop: tensors.read_rows(name, start, stop, rows, hidden))


def _refuse_unknown(tensors: HeadTensors, layer: str, where: str) -> None:
    known = {"fc.weight", "input_norm.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", *_IGNORED}
    for name in tensors.names():
        if name not in known and not name.startswith(layer):
            raise UnsupportedError(f"{where}: the weights hold {name!r}, which no EAGLE-3 head has that is supported")
