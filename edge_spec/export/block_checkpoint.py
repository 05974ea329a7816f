"""Heads on disk that draft a block at once: DFlash and DSpark, as their authors publish them (docs/heads-block.md).

A folder of ``config.json`` and safetensors: ``fc.weight`` [hidden, taps * hidden], ``hidden_norm.weight``, decoder
layers as a Qwen3 has them, ``norm.weight``. DSpark's may have ``markov_head.markov_w1.weight`` and ``markov_w2.weight``
[vocabulary, rank], and ``confidence_head.proj.weight`` [1, hidden + rank] with a bias. Embedding and lm_head are the
target's; a copy of them in the file is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal


from edge_spec.errors import CheckpointError, PairError, UnsupportedError
from edge_spec.export.architecture import Architecture, check_sizes, tensor_shapes
from edge_spec.export.checkpoint import Float32Array, require_finite
from edge_spec.export.config_check import check_config
from edge_spec.export.huggingface_config import read_architecture
from edge_spec.export.huggingface_folder import HuggingFaceFolder
from edge_spec.export.metadata import Metadata
from edge_spec.export.safetensors_file import SafetensorsFile
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


class BlockCheckpoint:
    """A head that was trained for one target. Its tensors have the names of a Hugging Face checkpoint's.

    Attributes:
        source: what it is called.
        facts: what it is made of.
        architecture: that of ``facts``.
    """

    def __init__(self, folder: Path, target: Architecture, source: str | None = None) -> None:
        """Read the configuration, and check that every tensor is there and that the head fits the target.

        Args:
            folder: where config.json and the weights lie.
            target: sizes of the target.
            source: what the head is called, if not by its folder.

        Raises:
            CheckpointError: a file is missing, damaged or incomplete.
            PairError: it was made for another target.
            UnsupportedError: it is another kind of network.
        """
        self.source = str(folder) if source is None else source
        self._folder = HuggingFaceFolder(folder)
        self.facts = read_facts(self._folder.config, target)
        self.architecture = self.facts.architecture
        self._check_fit(target)
        self._check_tensors()

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32. Raises CheckpointError if it is missing, cut short or not finite."""
        shard, stored = self._find(name)
        return require_finite(shard.rows(stored, 0, shard.tensors[stored].shape[0]), stored, str(shard.path))

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32, reading no more than those."""
        shard, stored = self._find(name)
        return require_finite(shard.rows(stored, start, stop), stored, str(shard.path))

    def sha256(self) -> str:
        """The hex digest of the weight files."""
        return self._folder.sha256()

    def _find(self, name: str) -> tuple[SafetensorsFile, str]:
        for prefix in ("", "model."):
            if prefix + name in self._folder.shards:
                return self._folder.shards[prefix + name], prefix + name
        raise CheckpointError(f"{self.source} lacks tensor {name!r}; download the head again")

    def _check_fit(self, target: Architecture) -> None:
        facts = self.facts
        for name, own, theirs in (
            ("hidden states of", facts.architecture.hidden_size, target.hidden_size),
            ("a vocabulary of", facts.architecture.logits_size, target.logits_size),
        ):
            if own != theirs:
                raise PairError(f"{self.source} is for {name} {own}, but the target has {theirs}; take its own head")
        rows = target.embedding_rows or target.logits_size
        if not 0 <= facts.mask_token < rows:
            raise PairError(
                f"{self.source} masks with token {facts.mask_token}, but the target's embedding has {rows} rows"
            )
        if facts.taps[-1] >= target.layers:
            # What such a head was shown is the last layer's output behind the final norm, as transformers tells it.
            raise PairError(
                f"{self.source} reads what is behind layer {facts.taps[-1] - 1}; expected layers before the target's "
                f"last, which is {target.layers - 1}"
            )

    def _check_tensors(self) -> None:
        facts, sizes = self.facts, self.architecture
        hidden, rank = sizes.hidden_size, facts.markov_rank
        expected = tensor_shapes(replace(sizes, tied_embeddings=True))
        del expected["embed_tokens.weight"]
        expected["fc.weight"] = (hidden, len(facts.taps) * hidden)
        expected["hidden_norm.weight"] = (hidden,)
        if rank:
            expected |= dict.fromkeys(
                ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), (sizes.logits_size, rank)
            )
        if facts.confidence:
            expected["confidence_head.proj.weight"] = (1, hidden + (rank if facts.confidence_reads_token else 0))
            expected["confidence_head.proj.bias"] = (1,)
        for name, shape in expected.items():
            shard, stored = self._find(name)
            found = shard.tensors[stored].shape
            if found != shape:
                raise CheckpointError(f"{shard.path}: tensor {stored!r} has shape {found}, expected {shape}")
            shard.require_readable(stored)


def read_facts(config: Metadata, target: Architecture) -> BlockFacts:
    """Read what a ``config.json`` says of a head for a target of these sizes.

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
        architecture=_architecture(config, target),
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
    )


def _kind(config: Metadata) -> Literal["dflash", "dspark"]:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{config.where}: architectures is {str(named)[:100]}, expected one of {', '.join(ARCHITECTURES)} for a head "
            "that drafts a block at once"
        )
    return ARCHITECTURES[name]


def _check_extras(
    config: Metadata, kind: str, rank: int, confidence: bool, reads_token: bool, said: Metadata
) -> None:
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


def _architecture(config: Metadata, target: Architecture) -> Architecture:
    """Sizes of the layers, which see all of what they are shown."""
    if config.text("model_type", "qwen3") != "qwen3":
        raise UnsupportedError(f"{config.where}: model_type is {config['model_type']!r}, expected 'qwen3'")
    # Only the layers of the head look at the configuration, and they know no window.
    check_config(config)
    trained = config.integer("max_position_embeddings")
    _, facts = read_architecture(config, min(trained, max(2, target.context_length)))
    if facts.window is not None:
        raise UnsupportedError(f"{config.where}: 'layer_types' names layers with a window, which is not supported")
    if facts.qkv_bias or facts.output_bias or facts.mlp_bias:
        raise UnsupportedError(f"{config.where}: attention_bias or mlp_bias is true, which is not supported")
    check_sizes(facts, config.where)
    return facts


