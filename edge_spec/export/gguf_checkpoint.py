"""GGUF checkpoints: llama.cpp's names and row order on disk, Hugging Face's at the interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Architecture, check_sizes, require_size, tensor_shapes
from edge_spec.export.checkpoint import Float32Array, Vocabulary, require_finite, weights_sha256
from edge_spec.export.family import Family, family_of_gguf_architecture
from edge_spec.export.gguf_dequantize import SUPPORTED_TYPES, dequantize
from edge_spec.export.gguf_file import GgufFile, GgufTensor
from edge_spec.export.gguf_tokenizer import read_vocabulary
from edge_spec.export.rope import Rope

_GLOBAL_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"
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

    def __init__(self, path: Path) -> None:
        """Read the header and check that every tensor the architecture needs is there, in a known encoding.

        Raises:
            CheckpointError: the file is missing, damaged, cut short or incomplete.
            UnsupportedError: the architecture, tokenizer or an encoding is not supported.
        """
        self.source = str(path)
        self._file = GgufFile(path)
        architecture = self._file.metadata.text("general.architecture")
        self._family = family_of_gguf_architecture(architecture, self.source)
        self.architecture = _read_architecture(self._file, self._family)
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
        return read_vocabulary(self._file.metadata, self.architecture.vocab_size)

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
        try:
            return self._file.tensors[gguf_name(name)]
        except KeyError:
            raise CheckpointError(f"{self.source} holds no tensor {name!r} (as {gguf_name(name)!r})") from None

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
        expected = {gguf_name(name): shape for name, shape in tensor_shapes(self.architecture).items()}
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
            if name not in expected and name != _ROPE_FACTORS:
                raise UnsupportedError(
                    f"{self.source}: tensor {name!r} is not part of a {self._family.name} decoder; this variant of "
                    "the architecture is not supported"
                )


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor: ``layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    module, _, kind = name.rpartition(".")
    if module in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


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


def _read_architecture(file: GgufFile, family: Family) -> Architecture:
    values, tensors = file.metadata, file.tensors
    prefix = values.text("general.architecture") + "."
    if prefix + "expert_count" in values and values.integer(prefix + "expert_count", minimum=0):
        raise UnsupportedError(f"{values.where} is a mixture of experts; only dense models are supported")
    for key in ("attention.head_count_kv", "attention.head_count", "feed_forward_length"):
        if isinstance(values.get(prefix + key), list):
            raise UnsupportedError(f"{values.where}: {prefix + key} differs between layers, which is not supported")
    heads, hidden = values.integer(prefix + "attention.head_count"), values.integer(prefix + "embedding_length")
    context = values.integer(prefix + "context_length")
    window = values.integer(prefix + "attention.sliding_window", context, minimum=0)
    if 0 < window < context:
        raise UnsupportedError(f"{values.where}: sliding-window attention ({window} of {context}) is not supported")
    head_size = values.integer(prefix + "attention.key_length", max(1, hidden // heads))
    require_size("head_size", head_size, values.where)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(prefix + key, head_size) != head_size:
            raise UnsupportedError(f"{values.where}: {prefix + key} differs from the head size {head_size}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{values.where} lacks tensor 'token_embd.weight'; it holds no complete language model")
    return Architecture(
        family=family.name,
        layers=values.integer(prefix + "block_count"),
        hidden_size=hidden,
        intermediate_size=values.integer(prefix + "feed_forward_length"),
        heads=heads,
        kv_heads=values.integer(prefix + "attention.head_count_kv", heads),
        head_size=head_size,
        vocab_size=tensors["token_embd.weight"].shape[0],
        context_length=context,
        norm_epsilon=values.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, prefix, head_size),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def _read_rope(file: GgufFile, prefix: str, head_size: int) -> Rope:
    values = file.metadata
    theta = values.number(prefix + "rope.freq_base", 10000.0)
    factors: npt.NDArray[np.float64] = np.ones(head_size // 2)
    scheme = values.text(prefix + "rope.scaling.type", "none")
    # Older files give a factor without a type.
    linear = values.number(prefix + "rope.scaling.factor", values.number(prefix + "rope.scale_linear", 1.0))
    if scheme == "linear" or (scheme == "none" and prefix + "rope.scaling.type" not in values):
        factors *= linear
    elif scheme != "none":
        raise UnsupportedError(f"{values.where}: rope scaling {scheme!r} is not supported; supported are none, linear")
    stored = file.tensors.get(_ROPE_FACTORS)
    if stored is not None:
        if stored.type is not GGMLQuantizationType.F32 or stored.shape != (head_size // 2,):
            raise CheckpointError(
                f"{values.where}: {_ROPE_FACTORS!r} is {stored.type.name} of shape {stored.shape}, expected F32 of "
                f"shape {(head_size // 2,)}"
            )
        factors *= dequantize(file.read_rows(stored, 0, 1), stored.type)[0]
        if not np.isfinite(factors).all() or (factors <= 0).any():
            raise CheckpointError(f"{values.where}: {_ROPE_FACTORS!r} holds values that are no finite number above 0")
    return Rope(theta, None if (factors == 1).all() else tuple(factors.tolist()))
