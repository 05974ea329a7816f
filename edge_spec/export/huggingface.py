"""Hugging Face checkpoints: a folder of config.json, safetensors and tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from edge_spec.errors import CheckpointError
from edge_spec.export.architecture import check_sizes, tensor_shapes
from edge_spec.export.checkpoint import Float32Array, Vocabulary, require_finite
from edge_spec.export.config_check import check_config, check_weights
from edge_spec.export.huggingface_config import read_architecture, text_config
from edge_spec.export.huggingface_folder import HuggingFaceFolder
from edge_spec.export.safetensors_file import SafetensorsFile

# The bare name is that of a checkpoint saved without its head; the others those of a model that also sees pictures.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


class HuggingFaceCheckpoint:
    """A folder as a checkpoint; implements :class:`~edge_spec.export.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path, source: str | None = None, context: int | None = None) -> None:
        """Read the configuration and check that every tensor the architecture needs is there.

        Args:
            folder: where config.json, tokenizer.json and the weights lie.
            source: what the checkpoint is called, if not by its folder.
            context: positions that are wanted; ``None`` for what the model was trained for.

        Raises:
            CheckpointError: a file is missing, damaged, cut short or incomplete.
            UnsupportedError: the architecture or the way the weights are stored is not supported.
        """
        self.source = str(folder) if source is None else source
        self._folder = HuggingFaceFolder(folder)
        config = text_config(self._folder.config)
        check_config(config)
        self._family, self.architecture = read_architecture(config, context)
        check_sizes(self.architecture, config.where)
        check_weights(config, self.architecture, _language_tensors(self._folder.shards))
        self._check_tensors()
        self.default_sampling = self._folder.default_sampling

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer and what belongs to it, read on first use.

        Raises:
            CheckpointError: a file is damaged, or tokens reach beyond the embedding.
            UnsupportedError: there is no tokenizer.json.
        """
        return self._folder.vocabulary(self.architecture.logits_size)

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32. Raises CheckpointError if it is missing, cut short or not finite."""
        shard, stored = self._find(name)
        values = require_finite(shard.rows(stored, 0, shard.tensors[stored].shape[0]), stored, str(shard.path))
        return values + 1 if self._family.gains_from_one and name.endswith("norm.weight") else values

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32, reading no more than those."""
        shard, stored = self._find(name)
        if not 0 <= start <= stop <= shard.tensors[stored].shape[0]:
            raise ValueError(f"rows {start}:{stop} of {name!r}, which has {shard.tensors[stored].shape[0]}")
        return require_finite(shard.rows(stored, start, stop), stored, str(shard.path))

    def sha256(self) -> str:
        """Return the hex digest of the weight files' contents, in the order of their names."""
        return self._folder.sha256()

    def _find(self, name: str) -> tuple[SafetensorsFile, str]:
        """Return the shard that holds a tensor, and the tensor's name in there."""
        if name == "lm_head.weight" and self.architecture.tied_embeddings:
            name = "embed_tokens.weight"
        for prefix in _PREFIXES:
            if prefix + name in self._folder.shards:
                return self._folder.shards[prefix + name], prefix + name
        raise CheckpointError(f"{self.source} lacks tensor {'model.' + name!r}; download or save the checkpoint again")

    def _check_tensors(self) -> None:
        for name, expected in tensor_shapes(self.architecture).items():
            shard, stored = self._find(name)
            shape = shard.tensors[stored].shape
            if shape != expected:
                raise CheckpointError(f"{shard.path}: tensor {stored!r} has shape {shape}, expected {expected}")
            shard.require_readable(stored)


def _language_tensors(shards: Mapping[str, SafetensorsFile]) -> dict[str, tuple[SafetensorsFile, str]]:
    """Return the shard of every tensor of the language model, and its name in there, by its name without prefixes."""
    kinds = ("embed_tokens.", "layers.", "norm.", "lm_head.")
    return {
        stored.removeprefix(prefix): (shard, stored)
        for stored, shard in shards.items()
        for prefix in _PREFIXES
        if stored.startswith(prefix) and stored.removeprefix(prefix).startswith(kinds)
    }
