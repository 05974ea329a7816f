"""Heads on disk that draft a block at once: DFlash and DSpark, as their authors publish them (docs/heads-block.md).

A folder of ``config.json`` and safetensors: ``fc.weight`` [hidden, taps * hidden], ``hidden_norm.weight``, decoder
layers as a Qwen3 has them, ``norm.weight``. DSpark's may have ``markov_head.markov_w1.weight`` and ``markov_w2.weight``
[vocabulary, rank], and ``confidence_head.proj.weight`` [1, hidden + rank] with a bias. Embedding and lm_head are the
target's; a copy of them in the file is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Architecture, check_sizes, tensor_shapes
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.config_check import check_config
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.huggingface_config import read_architecture
from edge_spec.export.metadata import Metadata
from edge_spec.manifest import ArchitectureRecord, Manifest
from edge_spec.manifest_check import MOST_BLOCK, MOST_MARKOV_RANK

# What ``architectures`` names, and which of the two layouts that is.
ARCHITECTURES: Mapping[str, Literal["dflash", "dspark"]] = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}

# Of other networks with a similar name, which change what the layers compute, by the value that changes nothing.
_NEVER_SET: Mapping[str, tuple[object, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa"),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "output_multiplier": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "draft_vocab_size": (None,),
    "shift_label": (None, False),
    "use_swa": (None, False),
}


@dataclass(frozen=True)
class BlockFacts:
    """What a head is made of.

    Attributes:
        kind: ``dflash``: the block's row j predicts the token in place j, so its first row, the anchor, predicts none.
            ``dspark``: row j predicts the token in place j + 1.
        taps: which hidden states of the target it reads, behind how many layers.
        block_size: rows of the block.
        mask_token: the id in every place but the anchor's.
        architecture: of its layers; there is no embedding and no lm_head.
        markov_rank: of the bias by the token before; 0 without one.
        confidence: whether it says how likely each token is to be accepted.
        confidence_reads_token: whether that depends on the token before.
    """

    kind: Literal["dflash", "dspark"]
    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    architecture: Architecture
    markov_rank: int = 0
    confidence: bool = False
    confidence_reads_token: bool = False

    @property
    def tokens(self) -> int:
        """Most tokens that one call proposes."""
        return self.block_size - (self.kind == "dflash")


def is_block_head(config: Metadata) -> bool:
    """Whether a checkpoint is such a head, by what its ``config.json`` calls it."""
    return _named(config) in ARCHITECTURES


class BlockCheckpoint:
    """A head that was trained for the target of a bundle.

    Attributes:
        source: what it is called.
        facts: what it is made of.
        architecture: that of ``facts``.
        tensors: by their names in the files.
    """

    def __init__(self, folder: HeadFolder, manifest: Manifest) -> None:
        """Read the configuration, and check that every tensor is there and that the head fits the target.

        Raises:
            CheckpointError: something is missing, damaged or does not fit the target.
            UnsupportedError: it is another kind of network.
        """
        self.source = folder.source
        self.sha256 = folder.sha256
        self.facts = read_facts(folder.config, manifest)
        self.architecture = self.facts.architecture
        prefix = "model." if "model.fc.weight" in folder.tensors else ""
        self.tensors: HeadTensors = folder.tensors.under(prefix)
        self._shapes = _shapes(self.facts)
        _check_fit(self.source, self.facts, manifest.target.architecture)
        for name, shape in self._shapes.items():
            self.tensors.read_rows(name, 0, 1, *shape)  # whether it is there, and can be read

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32. Raises CheckpointError if it is cut short or not finite."""
        return self.tensors.read(name, *self._shapes[name])

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32, reading no more than those."""
        return self.tensors.read_rows(name, start, stop, *self._shapes[name])


def _check_fit(source: str, facts: BlockFacts, target: ArchitectureRecord) -> None:
    """Raise CheckpointError unless a head was made for a target of these sizes."""
    sizes = facts.architecture
    for name, own, theirs in (
        ("hidden states of", sizes.hidden_size, target.hidden_size),
        ("a vocabulary of", sizes.logits_size, target.logits_size),
    ):
        if own != theirs:
            raise CheckpointError(
                f"{source} is for {name} {own}, but the target has {theirs}; is it a head for this target?"
            )
    if facts.mask_token >= target.readable_ids:
        raise CheckpointError(
            f"{source} masks with token {facts.mask_token}, but the target's embedding has {target.readable_ids} rows; "
            "is it a head for this target?"
        )
    if facts.taps[-1] > target.layers:
        raise CheckpointError(
            f"{source} reads what layer {facts.taps[-1] - 1} gives, but the target's last is {target.layers - 1}; is "
            "it a head for this target?"
        )
    if facts.taps[-1] == target.layers:
        # What such a head was shown is behind the final norm, as transformers tells it.
        raise UnsupportedError(f"{source} reads what the target's last layer gives, which is not supported")


def _shapes(facts: BlockFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor that is read, and its shape."""
    sizes, rank = facts.architecture, facts.markov_rank
    hidden = sizes.hidden_size
    shapes = tensor_shapes(replace(sizes, tied_embeddings=True))
    del shapes["embed_tokens.weight"]
    shapes["fc.weight"] = (hidden, len(facts.taps) * hidden)
    shapes["hidden_norm.weight"] = (hidden,)
    if rank:
        tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        shapes |= dict.fromkeys(tables, (sizes.logits_size, rank))
    if facts.confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if facts.confidence_reads_token else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def read_facts(config: Metadata, manifest: Manifest) -> BlockFacts:
    """Read what a ``config.json`` says of a head for the target of a bundle.

    Raises:
        CheckpointError: a value is missing, out of its range or contradicts another.
        UnsupportedError: it is another kind of network.
    """
    kind = _kind(config)
    own = config.get("dflash_config")
    if own is not None and not isinstance(own, Mapping):
        raise CheckpointError(f"{config.where}: 'dflash_config' is {own!r}, expected an object")
    said = Metadata({**config, **(own or {})}, config.where)
    for key, harmless in _NEVER_SET.items():
        value: Any = said.get(key)
        if isinstance(value, list | dict) or value not in harmless:
            raise UnsupportedError(f"{config.where}: {key} is {value!r}, which no head has that is supported")
    block_size = said.integer("block_size", 16, minimum=2)
    if block_size > MOST_BLOCK:
        raise UnsupportedError(f"{config.where}: block_size is {block_size}, expected at most {MOST_BLOCK}")
    rank = said.integer("markov_rank", 0, minimum=0)
    confidence = said.flag("enable_confidence_head", False)
    reads_token = confidence and said.flag("confidence_head_with_markov", False)
    _check_extras(config, kind, rank, confidence, reads_token, said)
    return BlockFacts(
        kind=kind,
        taps=_taps(said),
        block_size=block_size,
        mask_token=said.integer("mask_token_id", minimum=0),
        architecture=_architecture(config, manifest.context_length),
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
    )


def _named(config: Metadata) -> str:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    return name if isinstance(name, str) else ""


def _kind(config: Metadata) -> Literal["dflash", "dspark"]:
    if not is_block_head(config):
        raise UnsupportedError(
            f"{config.where}: architectures is {str(config.get('architectures'))[:100]}, expected one of "
            f"{', '.join(ARCHITECTURES)} for a head that drafts a block at once"
        )
    return ARCHITECTURES[_named(config)]


def _check_extras(config: Metadata, kind: str, rank: int, confidence: bool, reads_token: bool, said: Metadata) -> None:
    """Raise UnsupportedError or CheckpointError unless the parts beside the layers are those of DSpark, or absent."""
    if kind == "dflash" and (rank or confidence):
        raise UnsupportedError(
            f"{config.where}: a {config['architectures'][0]} with a Markov or confidence head is not supported, "
            "since it is not said which row of its block predicts which token"
        )
    if rank > MOST_MARKOV_RANK:
        raise UnsupportedError(f"{config.where}: markov_rank is {rank}, expected at most {MOST_MARKOV_RANK}")
    head = said.text("markov_head_type", "vanilla")
    if rank and head != "vanilla":
        raise UnsupportedError(f"{config.where}: markov_head_type {head!r} is not supported, only 'vanilla'")
    if reads_token and not rank:
        raise CheckpointError(f"{config.where}: confidence_head_with_markov is true, but markov_rank is 0")


def _taps(said: Metadata) -> tuple[int, ...]:
    """Behind how many layers the hidden states lie that the head reads: layer i, from 0, leaves i + 1 behind it."""
    listed = said.get("target_layer_ids")
    sound = isinstance(listed, list) and 0 < len(listed) <= 64 and all(type(layer) is int for layer in listed)
    if not isinstance(listed, list) or not sound or listed != sorted(set(listed)) or listed[0] < -1:
        raise CheckpointError(
            f"{said.where}: target_layer_ids is {str(listed)[:100]}, expected ascending numbers of layers"
        )
    if listed[0] == -1:
        raise UnsupportedError(f"{said.where}: target_layer_ids names the embedding (-1), which is not supported")
    return tuple(layer + 1 for layer in listed)


def _architecture(config: Metadata, context: int) -> Architecture:
    """Sizes of the layers, which see all of what they are shown."""
    if config.text("model_type") != "qwen3":
        raise UnsupportedError(f"{config.where}: model_type is {config['model_type']!r}, expected 'qwen3'")
    check_config(config)
    trained = config.integer("max_position_embeddings")
    _, facts = read_architecture(config, min(trained, max(2, context)))
    if facts.window is not None:
        raise UnsupportedError(f"{config.where}: 'layer_types' names layers with a window, which is not supported")
    if facts.qkv_bias or facts.output_bias or facts.mlp_bias:
        raise UnsupportedError(f"{config.where}: attention_bias or mlp_bias is true, which is not supported")
    check_sizes(facts, config.where)
    return facts
