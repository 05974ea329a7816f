"""A GGUF file that llama.cpp's converter wrote of a model says what the Hugging Face checkpoint of that model says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_converter import ARCHITECTURES, convert
from transformers import PreTrainedModel

from edge_spec.bundle import open_bundle
from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import Architecture, LayerAttention, tensor_shapes
from edge_spec.export.family import FAMILIES
from edge_spec.export.gguf_checkpoint import GgufCheckpoint
from edge_spec.export.gguf_file import GgufFile
from edge_spec.export.gguf_names import gguf_name
from edge_spec.export.huggingface import HuggingFaceCheckpoint
from edge_spec.export.pair import export_pair
from edge_spec.runtime.model import Model
from gguf_files import model_metadata, model_tensors, tokenizer_metadata, write_model
from tiny_models import LLAMA3_ROPE, LONGROPE, YARN, random_model, save_checkpoint

TOKENS = 60
GEMMA3 = {
    "family": "gemma3",
    "num_hidden_layers": 7,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-every-bias": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"family": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama-yarn": {"family": "llama", "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    "mistral": {"family": "mistral", "sliding_window": None},
    "qwen2": {"family": "qwen2"},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": {**YARN, "attention_factor": 1.25}},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-yarn": {"family": "qwen3", "rope_parameters": YARN},
    "smollm3": {"family": "smollm3", "num_hidden_layers": 5},
    "gemma3": GEMMA3,
    "gemma3-one-rope": {"family": "gemma3", "sliding_window": 512, "query_pre_attn_scalar": 16},
    "phi3": {"family": "phi3", "sliding_window": 20, "original_max_position_embeddings": 256},
    "phi3-part-of-the-head": {
        "family": "phi3",
        "hidden_size": 128,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 256,
    },
    "phi3-longrope": {"family": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    "granite": {
        "family": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.22,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
}


@dataclass(frozen=True)
class Converted:
    """A model as transformers has it, and both its files."""

    model: PreTrainedModel
    gguf: Path
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    model = random_model(**CASES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    return Converted(model, convert(folder / "model.gguf", model), save_checkpoint(folder / "checkpoint", model))


def require_same(ours: Architecture, theirs: Architecture) -> None:
    """Every fact is the same, numbers as far as float32, in which GGUF stores them, can tell."""
    kinds = {"family": "llama" if theirs.family == "mistral" else theirs.family}  # GGUF knows no Mistral
    for name, expected in {**asdict(theirs), **kinds}.items():
        value = asdict(ours)[name]
        if name != "attention":
            assert value == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected), name
    for mine, other in zip(ours.attention, theirs.attention, strict=True):
        assert mine.window == other.window
        assert (mine.rope is None) == (other.rope is None)
        if mine.rope is not None and other.rope is not None:
            assert (mine.rope.theta, mine.rope.size) == (other.rope.theta, other.rope.size)
            assert mine.rope.magnitude == pytest.approx(other.rope.magnitude, rel=1e-6)
            assert (mine.rope.frequency_factors is None) == (other.rope.frequency_factors is None)
            np.testing.assert_allclose(mine.rope.frequency_factors or (), other.rope.frequency_factors or (), rtol=1e-6)


def test_both_files_tell_of_the_same_architecture(converted: Converted) -> None:
    require_same(GgufCheckpoint(converted.gguf).architecture, HuggingFaceCheckpoint(converted.folder).architecture)


def test_both_files_hold_the_same_tensors_bit_by_bit(converted: Converted) -> None:
    ours, theirs = GgufCheckpoint(converted.gguf), HuggingFaceCheckpoint(converted.folder)
    for name, shape in tensor_shapes(theirs.architecture).items():
        expected = theirs.tensor(name)
        np.testing.assert_array_equal(ours.tensor(name), expected, err_msg=name)
        if len(shape) == 2:  # rows of part of a head, where those are permuted
            np.testing.assert_array_equal(ours.rows(name, 3, shape[0] - 5), expected[3:-5], err_msg=name)


def test_exported_graphs_compute_what_transformers_computes(converted: Converted, tmp_path: Path) -> None:
    report = export_pair(converted.gguf, None, tmp_path / "bundle", recipe="fp32", check=False)
    bundle = open_bundle(report.path)
    size = bundle.manifest.vocab_size
    ids = [int(token) for token in np.random.default_rng(5).integers(0, size, TOKENS)]
    with torch.no_grad():
        expected = converted.model(torch.tensor([ids])).logits[0].numpy()[:, :size]
    model = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 96, True, threads=1)
    assert np.ptp(expected) > 2
    np.testing.assert_allclose(model.forward(ids, range(TOKENS)), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("context", "factor"), [(None, 1.7), (100, 1.7), (128, 1.7), (129, 4.5), (256, 4.5)])
def test_the_wanted_context_decides_between_the_factors_of_longrope(
    tmp_path: Path, context: int | None, factor: float
) -> None:
    model = random_model(**CASES["phi3-longrope"])
    ours = GgufCheckpoint(convert(tmp_path / "model.gguf", model), context).architecture
    require_same(ours, HuggingFaceCheckpoint(save_checkpoint(tmp_path / "folder", model), context=context).architecture)
    assert ours.context_length == (context or 128)
    assert ours.ropes[0].frequency_factors is not None
    assert ours.ropes[0].frequency_factors[-1] == pytest.approx(factor)


@pytest.mark.parametrize("context", [1, 257])
def test_a_context_the_model_has_not_is_refused(tmp_path: Path, context: int) -> None:
    path = convert(tmp_path / "model.gguf", random_model(**CASES["phi3-longrope"]))
    with pytest.raises(CheckpointError, match=f"{context} tokens is wanted, expected 2 to 256"):
        GgufCheckpoint(path, context)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.gguf_architectures], ids=lambda f: f.name)
def test_names_are_those_of_the_gguf_package(family: Any) -> None:
    architecture = Architecture(
        family=family.name,
        hidden_size=8,
        intermediate_size=8,
        heads=1,
        kv_heads=1,
        head_size=8,
        logits_size=8,
        context_length=8,
        norm_epsilon=1e-5,
        attention=(LayerAttention(None),) * 3,
        tied_embeddings=False,
        qkv_bias=family.qkv_bias,
        fused_projections=family.fused_projections,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
    )
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.gguf_architectures[0]]
    names = gguf.get_tensor_name_map(kind, 3)
    for name in tensor_shapes(architecture):
        stored = name if name == "lm_head.weight" else f"model.{name}"
        assert gguf_name(name, architecture) == names.get_name(stored, try_suffixes=(".weight", ".bias")), name
    assert kind in ARCHITECTURES.values()


def phi3(folder: Path, layers: int, **facts: Any) -> Architecture:
    """The architecture of a Phi-3 of so many layers, of which only the first is written out."""
    sizes = {"context_length": 4096, "block_count": layers, **facts}
    tensors = model_tensors()
    gate, up = tensors.pop("blk.0.ffn_gate.weight"), tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = np.concatenate([gate, up])
    tensors["blk.0.attn_qkv.weight"] = np.concatenate([tensors.pop(f"blk.0.attn_{name}.weight") for name in "qkv"])
    for layer in range(1, layers):
        tensors |= {name.replace("blk.0", f"blk.{layer}"): data for name, data in tensors.items() if "blk.0." in name}
    metadata = {**model_metadata("phi3", **sizes), **tokenizer_metadata()}
    return GgufCheckpoint(write_model(folder / "model.gguf", metadata=metadata, tensors=tensors)).architecture


def test_early_phi3_files_have_a_window_without_saying_so(tmp_path: Path) -> None:
    """llama.cpp's load_hparams had it for LLM_ARCH_PHI3 until it gave up windows there: 2047 for 4,096 positions."""
    assert phi3(tmp_path, 32).window == 2047
    assert phi3(tmp_path, 32, attention__sliding_window=0).window is None  # Phi-4
    assert phi3(tmp_path, 32, context_length=16384).window is None
    assert phi3(tmp_path, 24).window is None


def gemma3(folder: Path, **facts: Any) -> Architecture:
    model = random_model(**{**GEMMA3, "num_hidden_layers": 2, **facts.pop("sizes", {})})
    path = convert(folder / "model.gguf", model)
    metadata = {**GgufFile(path).metadata, **{f"gemma3.{key}": value for key, value in facts.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    return GgufCheckpoint(write_model(folder / "changed.gguf", metadata=metadata, tensors=tensors)).architecture


@pytest.mark.parametrize(("pattern", "windows"), [([False, True], [None, 24]), (2, [24, None]), (1, [None, None])])
def test_a_gemma3_file_may_list_which_layers_have_the_window(
    tmp_path: Path, pattern: int | list[bool], windows: list[int | None]
) -> None:
    """llama_model_base::load_swa_pattern in src/llama-model.cpp."""
    facts = gemma3(tmp_path, **{"attention.sliding_window_pattern": pattern})
    assert [layer.window for layer in facts.attention] == windows
    thetas = [layer.rope.theta for layer in facts.attention if layer.rope is not None]
    assert thetas == [1e6 if window is None else 1e4 for window in windows]


def test_a_gemma3_file_need_not_name_the_base_of_the_windowed_layers(tmp_path: Path) -> None:
    facts = gemma3(tmp_path, **{"rope.freq_base_swa": None})
    assert facts.attention[0].rope is not None
    assert facts.attention[0].rope.theta == 1e4


@pytest.mark.parametrize(("layers", "query_size"), [(2, 16), (61, 16), (62, 32)])
def test_only_the_largest_gemma3_scales_queries_by_the_hidden_size(
    tmp_path: Path, layers: int, query_size: int
) -> None:
    """f_attention_scale in llama.cpp's src/models/gemma3.cpp: 27B is known by its 62 layers."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    facts = gemma3(tmp_path, sizes=sizes)
    assert facts.attention_scale == pytest.approx(query_size**-0.5)


def test_a_granite_without_positions_is_refused(tmp_path: Path) -> None:
    metadata = {**model_metadata("granite", rope__scaling__finetuned=False), **tokenizer_metadata()}
    with pytest.raises(UnsupportedError, match="rope.scaling.finetuned"):
        GgufCheckpoint(write_model(tmp_path / "model.gguf", metadata=metadata))


def test_a_granite_without_scales_is_a_llama(tmp_path: Path) -> None:
    metadata = {**model_metadata("granite", residual_scale=0.0), **tokenizer_metadata()}
    facts = GgufCheckpoint(write_model(tmp_path / "model.gguf", metadata=metadata)).architecture
    scales = (facts.embedding_scale, facts.attention_scale, facts.residual_scale, facts.logits_scale)
    assert scales == (1.0, None, 1.0, 1.0)


def test_a_magnitude_of_its_own_is_that_of_cos_and_sin(tmp_path: Path) -> None:
    metadata = {**model_metadata(rope__scaling__attn_factor=1.25), **tokenizer_metadata()}
    assert (
        GgufCheckpoint(write_model(tmp_path / "model.gguf", metadata=metadata)).architecture.ropes[0].magnitude == 1.25
    )
