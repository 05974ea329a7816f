"""Checkpoints of any size with random weights, written piece by piece: as safetensors (bfloat16) or GGUF (Q8_0).

The weights are scaled so that a model of them can be quantized, and its logits spread over a few nats. They are pieces
of one pool of random numbers, each beginning elsewhere in it, since billions of new ones would take minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_spec.export.architecture import Architecture, LayerAttention, tensor_shapes
from edge_spec.export.gguf_checkpoint import gguf_name
from edge_spec.export.rope import Rope

Pieces = Iterator[npt.NDArray[np.uint8]]
Progress = Callable[[int, int], None]


def _attention(layers: int) -> tuple[LayerAttention, ...]:
    return (LayerAttention(Rope(1e6, 128)),) * layers


def with_layers(facts: Architecture, layers: int) -> Architecture:
    """The same sizes with another number of layers."""
    return replace(facts, attention=_attention(layers))


SMALL = Architecture(
    family="qwen2",
    hidden_size=1024,
    intermediate_size=4096,
    heads=8,
    kv_heads=2,
    head_size=128,
    logits_size=32768,
    context_length=4096,
    norm_epsilon=1e-6,
    attention=_attention(2),
    tied_embeddings=False,
    qkv_bias=True,
)
# The shapes of Qwen2.5-1.5B and Qwen2.5-7B.
SIZES = {
    "small": SMALL,
    "1.5b": replace(
        SMALL,
        attention=_attention(28),
        hidden_size=1536,
        intermediate_size=8960,
        heads=12,
        logits_size=151936,
        context_length=32768,
        tied_embeddings=True,
    ),
    "7b": replace(
        SMALL,
        attention=_attention(28),
        hidden_size=3584,
        intermediate_size=18944,
        heads=28,
        kv_heads=4,
        logits_size=152064,
        context_length=32768,
    ),
}

# Elements: of the pool, and of what is written at a time.
_POOL = 1 << 23
_PIECE = 1 << 22
_ALIGNMENT = 32
_BLOCK = 32  # weights of Q8_0 that share a scale


def write_checkpoint(folder: Path, facts: Architecture, kind: str, progress: Progress) -> Path:
    """Write a checkpoint into ``folder`` and return its path; ``kind`` is ``"safetensors"`` or ``"gguf"``."""
    return (_write_gguf if kind == "gguf" else _write_safetensors)(folder, facts, progress)


def checkpoint_bytes(facts: Architecture) -> int:
    """Bytes of a checkpoint in bfloat16; one in Q8_0 has about half of them."""
    return 2 * sum(math.prod(shape) for shape in tensor_shapes(facts).values())


def _write_safetensors(folder: Path, facts: Architecture, progress: Progress) -> Path:
    shapes = tensor_shapes(facts)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header["model." * (name != "lm_head.weight") + name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    pool = _Pool(lambda values: (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2), 1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, (name, shape) in enumerate(shapes.items()):
            progress(index, len(shapes))
            for piece in pool.pieces(name, shape):
                file.write(piece.data)
    progress(len(shapes), len(shapes))
    (folder / "config.json").write_text(json.dumps(_config(facts)))
    vocabulary, merges = _vocabulary(facts.logits_size)
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _config(facts: Architecture) -> Mapping[str, object]:
    return {
        "model_type": facts.family,
        "num_hidden_layers": facts.layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_size,
        "vocab_size": facts.logits_size,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": facts.norm_epsilon,
        "rope_theta": facts.ropes[0].theta,
        "tie_word_embeddings": facts.tied_embeddings,
    }


def _write_gguf(folder: Path, facts: Architecture, progress: Progress) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, facts.family)
    for key, number in {
        "block_count": facts.layers,
        "context_length": facts.context_length,
        "embedding_length": facts.hidden_size,
        "feed_forward_length": facts.intermediate_size,
        "attention.head_count": facts.heads,
        "attention.head_count_kv": facts.kv_heads,
    }.items():
        writer.add_uint32(f"{facts.family}.{key}", number)
    writer.add_float32(f"{facts.family}.attention.layer_norm_rms_epsilon", facts.norm_epsilon)
    writer.add_float32(f"{facts.family}.rope.freq_base", facts.ropes[0].theta)
    vocabulary, merges = _vocabulary(facts.logits_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_token_merges([" ".join(merge) for merge in merges])

    shapes = tensor_shapes(facts)
    for name, shape in shapes.items():
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q8_0
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(gguf_name(name, facts), stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()

    vectors = _Pool(lambda values: values.view(np.uint8).reshape(-1, 4), 1)
    matrices = _Pool(lambda values: gguf.quantize(values[None], GGMLQuantizationType.Q8_0).reshape(-1, 34), _BLOCK)
    with path.open("ab") as file:
        for index, (name, shape) in enumerate(shapes.items()):
            progress(index, len(shapes))
            file.write(bytes(-file.tell() % _ALIGNMENT))
            for piece in (vectors if len(shape) == 1 else matrices).pieces(name, shape):
                file.write(piece.data)
        file.write(bytes(-file.tell() % _ALIGNMENT))
    progress(len(shapes), len(shapes))
    return path


class _Pool:
    """Random numbers in the encoding of a file.

    Args:
        encode: turns float32 numbers into uint8 [blocks, bytes of a block].
        block: numbers of a block.
    """

    def __init__(self, encode: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]], block: int) -> None:
        self._encode = encode
        self._block = block
        self._random = np.random.default_rng(0)
        self._numbers = self._random.standard_normal(_POOL, np.float32)
        self._encoded: dict[tuple[float, float], npt.NDArray[np.uint8]] = {}

    def pieces(self, name: str, shape: tuple[int, ...]) -> Pieces:
        """Yield the blocks of one tensor, some at a time."""
        if len(shape) == 2:
            spread, middle = (1.4 if "embed" in name or "lm_head" in name else 1.2) / math.sqrt(shape[1]), 0.0
        else:
            spread, middle = 0.3, 1.0 if "norm" in name else 0.0
        if (spread, middle) not in self._encoded:
            self._encoded[spread, middle] = self._encode(self._numbers * np.float32(spread) + np.float32(middle))
        pool = self._encoded[spread, middle]
        left = math.prod(shape) // self._block
        while left:
            count = min(left, _PIECE // self._block)
            start = self._random.integers(len(pool) - count + 1)
            yield pool[start : start + count]
            left -= count


def _vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a byte-level BPE of ``size`` ids: the bytes, then pairs, then some of three bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(islice(product(letters, letters), max(0, size - len(letters))))
    rest = max(0, size - len(letters) - len(pairs))
    triples = [(left + right, letter) for (left, right), letter in islice(product(pairs, letters), rest)]
    merges = [*pairs, *triples]
    return [*letters, *(left + right for left, right in merges)], merges
