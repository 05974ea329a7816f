from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import tensor_shapes
from edge_spec.export.huggingface import HuggingFaceCheckpoint

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save_tokenizer(folder: Path) -> None:
    vocabulary = {chr(ord("a") + index): index for index in range(26)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 26)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    write_json(path, **{**json.loads(path.read_text()), **changes})


def save_model(folder: Path, model: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    model.to(dtype).save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_model(tmp_path / "model", LlamaForCausalLM(LlamaConfig(**SIZES)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard_size", ["1GB", "8KB"], ids=["whole", "sharded"])
def test_every_tensor_equals_what_transformers_saved(tmp_path: Path, dtype: torch.dtype, shard_size: str) -> None:
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    checkpoint = HuggingFaceCheckpoint(save_model(tmp_path, model, dtype, max_shard_size=shard_size))
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "8KB")
    saved = model.state_dict()
    for name in tensor_shapes(checkpoint.architecture):
        expected = saved[name if name == "lm_head.weight" else "model." + name].float().numpy()
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, expected)
    expected = saved["lm_head.weight"].float().numpy()
    np.testing.assert_array_equal(checkpoint.rows("lm_head.weight", 7, 19), expected[7:19])
    assert checkpoint.rows("lm_head.weight", 7, 7).shape == (0, 32)
    with pytest.raises(ValueError, match="40"):
        checkpoint.rows("lm_head.weight", 39, 41)


def test_llama_facts(folder: Path) -> None:
    facts = HuggingFaceCheckpoint(folder).architecture
    assert (facts.family, facts.layers, facts.hidden_size, facts.intermediate_size) == ("llama", 2, 32, 48)
    assert (facts.heads, facts.kv_heads, facts.head_size, facts.vocab_size) == (4, 2, 8, 40)
    assert (facts.context_length, facts.norm_epsilon) == (256, 1e-6)
    assert (facts.tied_embeddings, facts.qkv_bias, facts.output_bias, facts.mlp_bias) == (False, False, False, False)
    assert (facts.rope.theta, facts.rope.frequency_factors) == (10000.0, None)


def test_tied_embeddings_and_an_explicit_head_size(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=16))
    checkpoint = HuggingFaceCheckpoint(save_model(tmp_path, model))
    assert checkpoint.architecture.tied_embeddings
    assert checkpoint.architecture.head_size == 16
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), checkpoint.tensor("embed_tokens.weight"))


def test_qwen2_has_biases_on_q_k_v_only(tmp_path: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(save_model(tmp_path, Qwen2ForCausalLM(Qwen2Config(**SIZES))))
    facts = checkpoint.architecture
    assert (facts.family, facts.qkv_bias, facts.output_bias, facts.mlp_bias) == ("qwen2", True, False, False)
    assert checkpoint.tensor("layers.1.self_attn.k_proj.bias").shape == (16,)


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", [LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0}], ids=["llama3", "linear"])
def test_rope_scaling_gives_the_frequencies_of_transformers(
    tmp_path: Path, layout: str, scaling: dict[str, Any]
) -> None:
    parameters = {**scaling, "rope_theta": 5e5}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": 64}, rope_parameters=parameters))
    save_model(tmp_path, model)
    if layout == "rope_scaling":  # the layout before transformers 5
        old = {("type" if key == "rope_type" and scaling is not LLAMA3_ROPE else key): scaling[key] for key in scaling}
        edit_config(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=5e5)
    rope = HuggingFaceCheckpoint(tmp_path).architecture.rope
    assert rope.theta == 5e5
    assert rope.frequency_factors is not None
    frequencies = 5e5 ** -(np.arange(0, 64, 2) / 64) / rope.frequency_factors
    np.testing.assert_allclose(frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


def test_a_checkpoint_saved_without_its_head_is_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path)
    checkpoint = HuggingFaceCheckpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor("norm.weight"), tensors["model.norm.weight"].numpy())


def test_sha256_runs_over_the_sorted_shards(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaForCausalLM(LlamaConfig(**SIZES)), max_shard_size="8KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    expected = hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    assert HuggingFaceCheckpoint(tmp_path).sha256() == expected


def test_vocabulary(folder: Path) -> None:
    write_json(folder / "generation_config.json", eos_token_id=[27, 3], do_sample=True, temperature=0.6, top_k=20)
    settings_ = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "old"}
    write_json(folder / "tokenizer_config.json", **settings_)
    checkpoint = HuggingFaceCheckpoint(folder)
    vocabulary = checkpoint.vocabulary
    assert vocabulary.size == 29
    assert vocabulary.special_token_ids == (26, 27)
    assert vocabulary.eos_token_ids == (2, 3, 27)  # 2 is LlamaConfig's own
    assert vocabulary.bos_token_id == 26
    assert vocabulary.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert vocabulary.chat_template == "old"
    assert checkpoint.default_sampling == {"temperature": 0.6, "top_k": 20.0}
    # Neither cut to 4 tokens nor padded to 16.
    assert vocabulary.tokenizer.encode("abcdefgh").ids == [26, *range(8)]


def test_a_template_file_wins_over_the_settings(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "named"}])
    assert HuggingFaceCheckpoint(folder).vocabulary.chat_template == "named"
    (folder / "chat_template.jinja").write_text("from the file")
    assert HuggingFaceCheckpoint(folder).vocabulary.chat_template == "from the file"


def test_greedy_recommendations_carry_no_sampling(folder: Path) -> None:
    write_json(folder / "generation_config.json", do_sample=False, temperature=0.6)
    assert HuggingFaceCheckpoint(folder).default_sampling == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral, qwen2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "different rope parameters"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5 of each head"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding-window"),
    ],
)
def test_variants_of_the_architecture_are_refused(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedError, match=complaint):
        HuggingFaceCheckpoint(folder)


def test_mistral_is_read_unless_its_window_slides(folder: Path) -> None:
    for window in (None, 256):
        edit_config(folder, **{**MistralConfig(**SIZES, sliding_window=window).to_dict(), "architectures": None})
        assert HuggingFaceCheckpoint(folder).architecture.family == "llama"
    edit_config(folder, sliding_window=255)
    with pytest.raises(UnsupportedError, match="255 of 256"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "'32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "lacks tensor 'model.layers.2"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"vocab_size": 41}, r"shape \(40, 32\), expected \(41, 32\)"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "must exceed"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": "none"}, "expected an object"),
    ],
)
def test_contradictory_configurations_are_refused(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"[1]", "no JSON object"),
        ("config.json", b"\xff\xfe", "config.json is not valid JSON"),
        ("model.safetensors", None, "holds neither model.safetensors nor"),
        ("model.safetensors", b"", "claims 0 bytes|damaged"),
        ("model.safetensors", b"\xff" * 64, "damaged or cut short"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{{", "not JSON"),
    ],
)
def test_missing_and_damaged_files_are_refused(folder: Path, file: str, content: bytes | None, complaint: str) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        "nonsense",
        None,
    ],
)
def test_nonsense_in_a_safetensors_header_is_refused(folder: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match="the entry of tensor 'x'"):
        HuggingFaceCheckpoint(folder)


def test_pytorch_weights_come_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="PyTorch .bin weights"):
        HuggingFaceCheckpoint(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_weights_cut_anywhere_are_refused(folder: Path, share: float) -> None:
    path, whole = folder / "model.safetensors", folder / "whole"
    if not whole.exists():
        whole.write_bytes(path.read_bytes())
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        HuggingFaceCheckpoint(folder)


def test_weights_cut_after_opening_are_reported(folder: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        checkpoint.tensor("norm.weight")


def test_an_unsupported_element_type_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(UnsupportedError, match="'model.norm.weight' is stored as F8_E4M3"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("damage", ["absent shard", "outside shard", "absent tensor", "no map", "absent entry"])
def test_a_broken_index_is_refused(tmp_path: Path, damage: str) -> None:
    save_model(tmp_path, LlamaForCausalLM(LlamaConfig(**SIZES)), max_shard_size="8KB")
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    shard = places["model.norm.weight"]
    if damage == "absent shard":
        (tmp_path / shard).unlink()
        complaint = f"names the shard '{shard}', which is missing"
    elif damage == "outside shard":
        places["model.norm.weight"] = "../other.safetensors"
        complaint = "outside its folder"
    elif damage == "absent tensor":
        places["model.norm.weight"] = next(other for other in places.values() if other != shard)
        complaint = "lacks tensor 'model.norm.weight'"
    elif damage == "no map":
        places = [shard]
        complaint = "no weight_map"
    else:
        del places["model.norm.weight"]
        complaint = "lacks tensor 'model.norm.weight'"
    write_json(index, weight_map=places)
    with pytest.raises(CheckpointError, match=complaint):
        HuggingFaceCheckpoint(tmp_path)


def test_a_tokenizer_must_be_there_whole_and_fit_the_embedding(folder: Path) -> None:
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"a":0', '"a":40').replace('"a": 0', '"a": 40'))
    with pytest.raises(CheckpointError, match="41 tokens, but the embedding has 40 rows"):
        _ = HuggingFaceCheckpoint(folder).vocabulary
    path.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        _ = HuggingFaceCheckpoint(folder).vocabulary
    path.unlink()
    with pytest.raises(UnsupportedError, match="tokenizer.json is missing"):
        _ = HuggingFaceCheckpoint(folder).vocabulary


def test_an_eos_id_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    write_json(folder / "generation_config.json", eos_token_id=[2, 999])
    with pytest.raises(CheckpointError, match="eos_token_id names 999"):
        _ = HuggingFaceCheckpoint(folder).vocabulary
