"""Small GGUF files for tests, written with the ``gguf`` package's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, MLP = 4, 2, 64, 256, 256

# The token texts that stand for single bytes in byte-level BPE (Radford et al. 2019): printable Latin-1 characters
# stand for themselves, the other bytes for the characters from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_TEXTS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def tokenizer_metadata(
    pre: str = "gpt-2",
    *,
    merges: tuple[str, ...] = (),
    added: Mapping[str, int] | None = None,
    padding: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Return the metadata of a tokenizer: 256 bytes in order of value, the merges' results, added tokens, padding."""
    added = {"<|endoftext|>": CONTROL} if added is None else added
    tokens = [BYTE_TEXTS[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges] + list(added)
    types = [NORMAL] * (256 + len(merges)) + list(added.values()) + [UNUSED] * padding
    tokens += [f"[PAD{index}]" for index in range(len(tokens), len(tokens) + padding)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def model_metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """Return the facts of a one-layer model; ``more`` adds or replaces keys, a double underscore standing for a dot."""
    facts: dict[str, Any] = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in facts.items()}


# Of a one-layer model with a token for every byte and one merge.
METADATA = {**model_metadata(), **tokenizer_metadata(merges=("z z",))}


def model_tensors(vocab_size: int = 300, *, qkv_bias: bool = False) -> dict[str, npt.NDArray[np.float32]]:
    """Return random tensors of a one-layer model with tied embeddings, by GGUF name."""
    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (query, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, query),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MLP),
        "output_norm.weight": (HIDDEN,),
    }
    if qkv_bias:
        shapes |= {"blk.0.attn_q.bias": (query,), "blk.0.attn_k.bias": (kv,), "blk.0.attn_v.bias": (kv,)}
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def encoded(kind: GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Return random blocks of an encoding, uint8 [rows, row_bytes], whose scales are small finite numbers."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(11)
    values = random.standard_normal((rows, columns), dtype=np.float32)
    if kind.name.endswith("_K"):  # the package cannot encode these
        blocks = random.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
        scales = {"Q2_K": (80, 82), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
        for offset in scales:
            scale = random.uniform(0.01, 0.02, (len(blocks), 1)).astype(np.float16)
            blocks[:, offset : offset + 2] = scale.view(np.uint8)
        return blocks.reshape(rows, -1)
    return gguf.quantize(values, kind).view(np.uint8).reshape(rows, -1)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    encodings: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file. Tensors named in ``encodings`` are given as encoded bytes, the others are stored as they are."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=(encodings or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    encodings: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a complete one-layer model with a byte-level tokenizer; what is given replaces the defaults."""
    return write_gguf(
        path,
        {**model_metadata(), **tokenizer_metadata()} if metadata is None else metadata,
        model_tensors() if tensors is None else tensors,
        encodings,
    )
