"""GGUF checkpoints: llama.cpp's names and row order on disk, Hugging Face's at the interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import check_sizes, tensor_shapes
from edge_spec.export.checkpoint import Float32Array, Vocabulary, require_finite, weights_sha256
from edge_spec.export.family import family_of_gguf_architecture
from edge_spec.export.gguf_architecture import read_architecture
from edge_spec.export.gguf_dequantize import SUPPORTED_TYPES, dequantize
from edge_spec.export.gguf_file import GgufFile, GgufTensor
from edge_spec.export.gguf_names import gguf_name
from edge_spec.export.gguf_rope import ROPE_TENSORS
from edge_spec.export.gguf_tokenizer import read_vocabulary

_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}

# Rows are read and decoded in pieces of about this many elements: few enough that a piece's temporaries stay at
# some megabytes, enough that the threads rarely meet.
_PIECE_ELEMENTS = 2**20
_THREADS = min(4, os.cpu_count() or 1)


class GgufCheckpoint:
    """A GGUF file as a checkpoint; implements :class:`~edge_spec.export.checkpoint.Checkpoint`."""

    def __init__(self, path: Path, context: int | None = None, source: str | None = None) -> None:
        """Read the header and check that every tensor the architecture needs is there, in a known encoding.

        Args:
            path: the file.
            context: positions that are wanted; ``None`` for what the model was trained for.
            source: what the checkpoint is called, if not by its path.

        Raises:
            CheckpointError: the file is missing, damaged, cut short or incomplete, or has fewer positions.
            UnsupportedError: the architecture, tokenizer or an encoding is not supported.
        """
        self.source = str(path) if source is None else source
        self._file = GgufFile(path)
        architecture = self._file.metadata.text("general.architecture")
        self._family = family_of_gguf_architecture(architecture, self.source)
        self.architecture = read_architecture(self._file, self._family, context)
        check_sizes(self.architecture, self.source)
        self._check_tensors()
        self.default_sampling: Mapping[str, float] = self._file.metadata.numbers(_SAMPLING_KEYS)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer and what belongs to it, rebuilt from the metadata on first use.

        Raises:
            CheckpointError: the tokenizer's metadata is incomplete or inconsistent.
            UnsupportedError: the kind of tokenizer or its pre-tokenizer is not supported.
        """
        return read_vocabulary(self._file.metadata, self.architecture.logits_size)

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32. Raises CheckpointError if it is missing, cut short or not finite."""
        tensor = self._find(name)
        values = self._decode(name, tensor, 0, tensor.rows).reshape(tensor.shape)
        return require_finite(values, tensor.name, self.source)

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32, reading no more than those."""
        tensor = self._find(name)
        if not 0 <= start <= stop <= tensor.rows:
            raise ValueError(f"rows {start}:{stop} of {name!r}, which has {tensor.rows}")
        return require_finite(self._decode(name, tensor, start, stop), tensor.name, self.source)

    def sha256(self) -> str:
        """Return the hex digest of the file."""
        return weights_sha256(self._file.path)

    def _find(self, name: str) -> GgufTensor:
        if name == "lm_head.weight" and self.architecture.tied_embeddings:
            name = "embed_tokens.weight"
        stored = gguf_name(name, self.architecture)
        try:
            return self._file.tensors[stored]
        except KeyError:
            raise CheckpointError(f"{self.source} holds no tensor {name!r} (as {stored!r})") from None

    def _decode(self, name: str, tensor: GgufTensor, start: int, stop: int) -> Float32Array:
        """Decode rows ``start:stop`` in the Hugging Face order, float32 [stop - start, columns]."""
        if not self._is_permuted(name):
            return self._decode_stored(tensor, start, stop)
        size = self.architecture.head_size
        if name.endswith(".bias"):  # stored as a single row
            return rotate_half_order(self._decode_stored(tensor, 0, 1).reshape(-1, 1), size).reshape(1, -1)
        # The rows of a head are shuffled among themselves, so whole heads are read and put in order.
        first, last = start // size * size, -(-stop // size) * size
        return rotate_half_order(self._decode_stored(tensor, first, last), size)[start - first : stop - first]

    def _is_permuted(self, name: str) -> bool:
        """Return whether the rows of a tensor are stored in interleaved rotary order."""
        return self._family.gguf_permuted_qk and (".q_proj." in name or ".k_proj." in name)

    def _decode_stored(self, tensor: GgufTensor, start: int, stop: int) -> Float32Array:
        columns = tensor.shape[-1]
        out = np.empty((stop - start, columns), dtype=np.float32)
        step = max(1, _PIECE_ELEMENTS // columns)

        def decode(piece: int) -> None:
            end = min(piece + step, stop)
            out[piece - start : end - start] = dequantize(self._file.read_rows(tensor, piece, end), tensor.type)

        pieces = range(start, stop, step)
        if len(pieces) <= 1:
            for piece in pieces:
                decode(piece)
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(decode, pieces):
                    pass
        return out

    def _check_tensors(self) -> None:
        facts = self.architecture
        expected = {gguf_name(name, facts): shape for name, shape in tensor_shapes(facts).items()}
        for name, shape in expected.items():
            tensor = self._file.tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"{self.source} lacks tensor {name!r}; convert the model again")
            if tensor.shape != shape:
                raise CheckpointError(f"{self.source}: tensor {name!r} has shape {tensor.shape}, expected {shape}")
            if tensor.type not in SUPPORTED_TYPES:
                known = ", ".join(kind.name for kind in SUPPORTED_TYPES)
                raise UnsupportedError(
                    f"{self.source}: tensor {name!r} is encoded as {tensor.type.name}; supported are {known}"
                )
        # A tensor nobody reads is part of a computation nobody does: the outputs would be silently wrong.
        for name in self._file.tensors:
            if name not in expected and name not in ROPE_TENSORS:
                raise UnsupportedError(
                    f"{self.source}: tensor {name!r} is not part of a {self._family.name} decoder; this variant of "
                    "the architecture is not supported"
                )


def rotate_half_order(rows: Float32Array, head_size: int) -> Float32Array:
    """Reorder the rows of whole heads from interleaved rotary pairs (0, 1), (2, 3), ... to halves.

    Args:
        rows: float32 [heads * head_size, columns]; within a head row ``2i + j`` is half ``j`` of rotary pair ``i``.
        head_size: rows of one head.

    Returns:
        float32 of the same shape; within a head, row ``j * head_size / 2 + i`` is half ``j`` of pair ``i``.
    """
    pairs = rows.reshape(-1, head_size // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
