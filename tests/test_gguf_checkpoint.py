from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import tensor_shapes
from edge_spec.export.gguf_checkpoint import GgufCheckpoint
from edge_spec.export.gguf_dequantize import SUPPORTED_TYPES
from edge_spec.export.rope import Rope
from gguf_files import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    encoded,
    model_metadata,
    model_tensors,
    tokenizer_metadata,
    write_model,
)


def interleaved(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Shuffle rows as llama.cpp's converter does for q and k: row ``j * half + i`` of a head becomes ``2i + j``."""
    out, half = np.empty_like(rows), HEAD_SIZE // 2
    for head in range(heads):
        for row in range(HEAD_SIZE):
            out[head * HEAD_SIZE + 2 * (row % half) + row // half] = rows[head * HEAD_SIZE + row]
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def write_variant(folder: Path, architecture: str = "llama", **facts: Any) -> Path:
    bias = architecture == "qwen2"
    return write_model(
        folder / "model.gguf",
        metadata={**model_metadata(architecture, **facts), **tokenizer_metadata()},
        tensors=model_tensors(qkv_bias=bias),
    )


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_every_supported_encoding_decodes_as_the_gguf_package_does(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    # More than a million elements, so that several pieces are decoded side by side and the last one is ragged.
    stored = encoded(kind, 5003, HIDDEN)
    tensors = {**model_tensors(), "token_embd.weight": stored}
    encodings = {"token_embd.weight": kind}
    checkpoint = GgufCheckpoint(write_model(tmp_path / "model.gguf", tensors=tensors, encodings=encodings))
    expected = gguf.dequantize(stored, kind).reshape(5003, HIDDEN)
    assert np.isfinite(expected).all()
    embedding = checkpoint.tensor("embed_tokens.weight")
    assert embedding.dtype == np.float32
    np.testing.assert_array_equal(embedding, expected)
    np.testing.assert_array_equal(checkpoint.rows("embed_tokens.weight", 4097, 4100), expected[4097:4100])


def test_llama_rows_of_q_and_k_come_back_in_rotate_half_order(tmp_path: Path) -> None:
    original = model_tensors(qkv_bias=True)
    stored = dict(original)
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        for kind in ("weight", "bias"):
            stored[f"blk.0.{name}.{kind}"] = interleaved(original[f"blk.0.{name}.{kind}"], heads)
    checkpoint = GgufCheckpoint(write_model(tmp_path / "model.gguf", tensors=stored))
    assert checkpoint.architecture.qkv_bias
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")):
        for kind in ("weight", "bias"):
            name = f"layers.0.self_attn.{ours}.{kind}"
            np.testing.assert_array_equal(checkpoint.tensor(name), original[f"blk.0.{theirs}.{kind}"])
    rows = checkpoint.rows("layers.0.self_attn.q_proj.weight", 30, 101)
    np.testing.assert_array_equal(rows, original["blk.0.attn_q.weight"][30:101])


def test_qwen2_rows_are_left_as_they_are(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_variant(tmp_path, "qwen2"))
    original = model_tensors(qkv_bias=True)
    assert (checkpoint.architecture.family, checkpoint.architecture.qkv_bias) == ("qwen2", True)
    for kind in ("weight", "bias"):
        name = f"layers.0.self_attn.q_proj.{kind}"
        np.testing.assert_array_equal(checkpoint.tensor(name), original[f"blk.0.attn_q.{kind}"])


def test_every_tensor_of_the_architecture_can_be_read(model: Path) -> None:
    checkpoint = GgufCheckpoint(model)
    for name, shape in tensor_shapes(checkpoint.architecture).items():
        assert checkpoint.tensor(name).shape == shape
    original = model_tensors()
    np.testing.assert_array_equal(checkpoint.tensor("layers.0.mlp.down_proj.weight"), original["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(checkpoint.tensor("norm.weight"), original["output_norm.weight"])


def test_lm_head_is_the_embedding_unless_the_file_has_its_own(tmp_path: Path) -> None:
    tied = GgufCheckpoint(write_model(tmp_path / "tied.gguf"))
    assert tied.architecture.tied_embeddings
    np.testing.assert_array_equal(tied.tensor("lm_head.weight"), tied.tensor("embed_tokens.weight"))
    head = np.ones((300, HIDDEN), dtype=np.float32)
    untied = GgufCheckpoint(write_model(tmp_path / "untied.gguf", tensors={**model_tensors(), "output.weight": head}))
    assert not untied.architecture.tied_embeddings
    np.testing.assert_array_equal(untied.rows("lm_head.weight", 5, 9), head[5:9])


def test_architecture_facts(tmp_path: Path) -> None:
    facts = GgufCheckpoint(write_variant(tmp_path, context_length=777, rope__freq_base=5e5)).architecture
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_size) == (1, HEADS, KV_HEADS, HEAD_SIZE)
    assert (facts.logits_size, facts.context_length) == (300, 777)
    assert facts.norm_epsilon == pytest.approx(1e-5)
    assert facts.ropes == (Rope(5e5, HEAD_SIZE),)


def test_linear_scaling_and_stored_factors_multiply(tmp_path: Path) -> None:
    stored = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    metadata = model_metadata(rope__scaling__type="linear", rope__scaling__factor=2.0)
    path = write_model(
        tmp_path / "model.gguf",
        metadata={**metadata, **tokenizer_metadata()},
        tensors={**model_tensors(), "rope_freqs.weight": stored},
    )
    factors = GgufCheckpoint(path).architecture.ropes[0].frequency_factors
    assert factors is not None
    np.testing.assert_allclose(factors, 2 * stored)


def test_a_scaling_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_variant(tmp_path, rope__scale_linear=4.0))
    assert checkpoint.architecture.ropes[0].frequency_factors == (4.0,) * (HEAD_SIZE // 2)


def test_a_window_is_one_of_every_layer_of_a_llama(tmp_path: Path) -> None:
    assert GgufCheckpoint(write_variant(tmp_path, attention__sliding_window=128)).architecture.window == 128
    assert GgufCheckpoint(write_variant(tmp_path, attention__sliding_window=512)).architecture.window is None
    path = write_variant(tmp_path, attention__sliding_window=128)
    assert GgufCheckpoint(path, context=128).architecture.window is None  # nothing is ever outside of it
    with pytest.raises(UnsupportedError, match="attention.sliding_window is 128.*qwen2"):
        GgufCheckpoint(write_variant(tmp_path, "qwen2", attention__sliding_window=128))


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    recommended = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    path = write_model(tmp_path / "model.gguf", metadata={**model_metadata(), **tokenizer_metadata(), **recommended})
    assert GgufCheckpoint(path).default_sampling == pytest.approx({"temperature": 0.7, "top_k": 20})


def test_sha256_is_that_of_the_file(model: Path) -> None:
    assert GgufCheckpoint(model).sha256() == hashlib.sha256(model.read_bytes()).hexdigest()


def test_rows_out_of_range_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="300"):
        GgufCheckpoint(model).rows("embed_tokens.weight", 290, 301)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"rope__scaling__type": "dynamic", "rope__scaling__factor": 4.0}, "'dynamic'.*none, linear, yarn, longrope"),
        ({"rope__scaling__alpha": 1000.0}, "llama.rope.scaling.alpha"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_ext_factor": 0.5},
            "yarn_ext_factor is 0.5",
        ),
        ({"expert_count": 8}, "mixture of experts"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
        ({"logit_scale": 0.5}, "llama.logit_scale"),
        ({"attention__causal": False}, "attention.causal"),
        ({"attention__value_length": 32}, "attention.value_length"),
        ({"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv differs between layers"),
        ({"rope__dimension_count": 32}, "rope.dimension_count"),
        ({"something_new": [1, 2]}, "llama.something_new is a list of 2"),
    ],
)
def test_keys_that_ask_for_another_computation_are_refused_by_name(
    tmp_path: Path, facts: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        GgufCheckpoint(write_variant(tmp_path, **facts))


@pytest.mark.parametrize(
    "facts",
    [
        {"expert_count": 0, "expert_used_count": 0},
        {"attention__sliding_window": 0},
        {"attention__head_count_kv": [KV_HEADS], "feed_forward_length": [256]},
        {"final_logit_softcapping": 0.0},
        {"attention__causal": True},
        {"vocab_size": 300, "tensor_data_layout": "Meta AI original pth"},
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"rope__scaling__original_context_length": 128},
        {"vision__block_count": 27},
    ],
)
def test_keys_without_effect_are_passed_over(tmp_path: Path, facts: dict[str, Any]) -> None:
    plain = GgufCheckpoint(write_model(tmp_path / "plain.gguf")).architecture
    assert GgufCheckpoint(write_variant(tmp_path, **facts)).architecture == plain


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__freq_base": 1.0},
            "rope.freq_base 1 is no base",
        ),
        ({"rope__scaling__type": "longrope"}, "lacks tensor 'rope_factors_short.weight'"),
        ({"rope__dimension_count": 31}, "rope.dimension_count is 31"),
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": "three"}, "'three'"),
        ({"attention__head_count_kv": 3}, "cannot share"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "nan"),
        ({"embedding_length": 512}, "token_embd.weight.* expected"),
        ({"block_count": 2}, "lacks tensor 'blk.1"),
    ],
)
def test_contradictory_metadata_is_refused(tmp_path: Path, facts: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        GgufCheckpoint(write_variant(tmp_path, **facts))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    metadata = {**model_metadata("mamba"), **tokenizer_metadata()}
    with pytest.raises(UnsupportedError, match="'mamba'.*llama, qwen2"):
        GgufCheckpoint(write_model(tmp_path / "model.gguf", metadata=metadata))


def test_an_unsupported_encoding_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q2_K
    tensors = {**model_tensors(), "blk.0.ffn_up.weight": encoded(kind, 256, HIDDEN)}
    path = write_model(tmp_path / "model.gguf", tensors=tensors, encodings={"blk.0.ffn_up.weight": kind})
    with pytest.raises(UnsupportedError, match="'blk.0.ffn_up.weight' is encoded as Q2_K.*Q4_K"):
        GgufCheckpoint(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors["blk.0.ffn_up.weight"]
    with pytest.raises(CheckpointError, match="lacks tensor 'blk.0.ffn_up.weight'"):
        GgufCheckpoint(write_model(tmp_path / "model.gguf", tensors=tensors))


def test_a_tensor_nobody_would_read_is_refused(tmp_path: Path) -> None:
    tensors = {**model_tensors(), "blk.0.attn_q_norm.weight": np.ones(HEAD_SIZE, dtype=np.float32)}
    with pytest.raises(UnsupportedError, match="blk.0.attn_q_norm.weight"):
        GgufCheckpoint(write_model(tmp_path / "model.gguf", tensors=tensors))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else entirely"])
def test_a_file_with_another_magic_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GgufCheckpoint(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read .*absent.gguf"):
        GgufCheckpoint(tmp_path / "absent.gguf")


def header(version: int = 3, tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


HUGE = struct.pack("<Q", 2**60)
NAME = struct.pack("<Q", 1) + b"x"


@pytest.mark.parametrize(
    "content",
    [
        header(pairs=2**60),
        header(tensors=2**60),
        header(pairs=1, rest=HUGE),
        header(pairs=1, rest=NAME + struct.pack("<I", 8) + HUGE),
        header(pairs=1, rest=NAME + struct.pack("<II", 9, 4) + HUGE),
        header(pairs=1, rest=NAME + struct.pack("<II", 9, 8) + HUGE),
        header(pairs=1, rest=NAME + struct.pack("<I", 99)),
        header(pairs=1, rest=struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1)),
        header(pairs=2, rest=(NAME + struct.pack("<II", 4, 1)) * 2),
        header(tensors=1, rest=NAME + struct.pack("<I", 2**31)),
        header(tensors=1, rest=NAME + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
        header(tensors=1, rest=NAME + struct.pack("<IQIQ", 1, 0, 0, 0)),
        header(tensors=1, rest=NAME + struct.pack("<IQIQ", 1, 8, 0, 2**63)),
        header(tensors=1, rest=NAME + struct.pack("<IQIQ", 1, 8, 12, 0)),
    ],
)
def test_absurd_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or cut short|is cut short"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1, rest=NAME + struct.pack("<IQIQ", 1, 8, 250, 0)), "'x' has the unknown type number 250"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match=complaint):
        GgufCheckpoint(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(model: Path, share: float) -> None:
    content = model.read_bytes()
    cut = model.with_name("cut.gguf")
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError):
        GgufCheckpoint(cut)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_surface_as_another_error(model: Path, data: st.DataObject) -> None:
    content = bytearray(model.read_bytes())
    tensor_data = len(content) - sum(array.nbytes for array in model_tensors().values())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, tensor_data))] = data.draw(st.integers(0, 255))
    damaged = model.with_name("damaged.gguf")
    damaged.write_bytes(content)
    complaint = f"{damaged}"
    try:
        assert GgufCheckpoint(damaged).vocabulary.size > 0
    except CheckpointError as error:
        complaint = str(error)
    assert str(damaged) in complaint


def test_a_file_cut_after_opening_is_reported(model: Path) -> None:
    checkpoint = GgufCheckpoint(model)
    model.write_bytes(model.read_bytes()[:-HIDDEN])
    with pytest.raises(CheckpointError, match="ends inside tensor 'output_norm.weight'"):
        checkpoint.tensor("norm.weight")


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "kv_heads", "head_size", "vocab_size", "theta", "tied"),
    [
        ("smollm2", 30, 576, 9, 3, 64, 49152, 1e5, True),
        ("qwen-draft", 24, 896, 14, 2, 64, 151936, 1e6, False),
        ("qwen-target", 28, 1536, 12, 2, 128, 151936, 1e6, False),
    ],
)
def test_real_files(
    real_weights: Callable[[str], Path],
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    vocab_size: int,
    theta: float,
    tied: bool,
) -> None:
    checkpoint = GgufCheckpoint(real_weights(name))
    facts = checkpoint.architecture
    assert (facts.layers, facts.hidden_size, facts.heads, facts.kv_heads) == (layers, hidden, heads, kv_heads)
    assert (facts.head_size, facts.logits_size, facts.ropes[0].theta) == (head_size, vocab_size, theta)
    assert facts.tied_embeddings is tied
    weight = checkpoint.tensor("layers.0.mlp.down_proj.weight")
    assert np.isfinite(weight).all()
    assert 0.001 < weight.std() < 1
