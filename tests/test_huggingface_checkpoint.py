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
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.architecture import LayerAttention, tensor_shapes
from edge_spec.export.huggingface import HuggingFaceCheckpoint
from edge_spec.export.rope import Rope

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
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
    assert (facts.heads, facts.kv_heads, facts.head_size, facts.logits_size) == (2, 1, 16, 40)
    assert (facts.context_length, facts.norm_epsilon) == (256, 1e-6)
    assert (facts.tied_embeddings, facts.qkv_bias, facts.output_bias, facts.mlp_bias) == (False, False, False, False)
    assert facts.attention == (LayerAttention(Rope(10000.0, 16)),) * 2


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
    (rope,) = HuggingFaceCheckpoint(tmp_path).architecture.ropes
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
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3, smollm3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "8 elements of heads of 16"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding-window"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ],
)
def test_variants_of_the_architecture_are_refused(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedError, match=complaint):
        HuggingFaceCheckpoint(folder)


def windows(checkpoint: HuggingFaceCheckpoint) -> list[int | None]:
    return [layer.window for layer in checkpoint.architecture.attention]


@pytest.mark.parametrize(("window", "expected"), [(None, None), (256, None), (255, 255), ("absent", None)])
def test_all_layers_of_mistral_see_its_window(folder: Path, window: Any, expected: int | None) -> None:
    config = {**MistralConfig(**SIZES).to_dict(), "architectures": None, "sliding_window": window}
    if window == "absent":  # 4096, more than the context
        del config["sliding_window"]
    write_json(folder / "config.json", **config)
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.architecture.family == "mistral"
    assert windows(checkpoint) == [expected] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None, None]),
        ({"sliding_window": 128}, [None, None]),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, [None, 128]),
        ({"sliding_window": 128, "use_sliding_window": True}, [None, None]),  # from the 28th layer on
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, [64, None]),
    ],
)
def test_layers_of_qwen2_see_what_their_configuration_says(
    tmp_path: Path, changes: dict[str, Any], expected: list[int | None]
) -> None:
    save_model(tmp_path, Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    edit_config(tmp_path, **{"layer_types": None, **changes})
    assert windows(HuggingFaceCheckpoint(tmp_path)) == expected


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        (
            {"layer_types": ["full_attention"]},
            CheckpointError,
            "'layer_types' has 1 entries, expected one for each of 2",
        ),
        ({"layer_types": "full_attention"}, CheckpointError, "'layer_types' has 'full_attention'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, UnsupportedError, "names 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, CheckpointError, "lacks 'sliding_window'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, CheckpointError, "'sliding_window' is 0"),
    ],
)
def test_layers_that_are_not_described_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    save_model(tmp_path, Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=complaint):
        HuggingFaceCheckpoint(tmp_path)


def test_the_layers_of_smollm3_without_rotary_embedding(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 5, "pad_token_id": None}
    save_model(tmp_path, SmolLM3ForCausalLM(SmolLM3Config(**sizes)))
    for listed in (None, [1, 1, 1, 0, 1]):
        edit_config(tmp_path, no_rope_layers=listed)
        rotated = [layer.rope is not None for layer in HuggingFaceCheckpoint(tmp_path).architecture.attention]
        assert rotated == [True, True, True, False, True]
    edit_config(tmp_path, no_rope_layers=[1, 0])
    with pytest.raises(CheckpointError, match="'no_rope_layers' is"):
        HuggingFaceCheckpoint(tmp_path)


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    sizes = {**SIZES, "num_hidden_layers": 6, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**sizes, "pad_token_id": None, "sliding_window": 32, **changes}))


def test_a_gemma3_that_sees_pictures_is_read_as_the_language_model_in_it(tmp_path: Path) -> None:
    """Published ones are sparse: the language model's configuration leaves out what transformers fills in."""
    model = gemma3()
    save_model(tmp_path, model)
    alone = HuggingFaceCheckpoint(tmp_path)
    norm = alone.tensor("norm.weight")
    tensors = load_file(tmp_path / "model.safetensors")
    text = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")}
    text |= {"num_hidden_layers": 6, "model_type": "gemma3_text", "sliding_window": 32}
    write_json(tmp_path / "config.json", model_type="gemma3", text_config=text, vision_config={"hidden_size": 8})
    for prefix in ("language_model.", "model.language_model."):
        inner = {prefix + (name if prefix == "language_model." else name.removeprefix("model.")): tensor
                 for name, tensor in tensors.items()}  # fmt: skip
        save_file({**inner, "vision_tower.x": torch.zeros(2)}, tmp_path / "model.safetensors")
        checkpoint = HuggingFaceCheckpoint(tmp_path)
        assert checkpoint.architecture == alone.architecture
        np.testing.assert_array_equal(checkpoint.tensor("norm.weight"), norm)


def test_gains_of_gemma3_are_stored_as_distances_from_one(tmp_path: Path) -> None:
    model = gemma3()
    with torch.no_grad():
        model.model.norm.weight.fill_(0.25)
        model.model.layers[0].self_attn.q_norm.weight.fill_(-0.5)
    checkpoint = HuggingFaceCheckpoint(save_model(tmp_path, model))
    np.testing.assert_array_equal(checkpoint.tensor("norm.weight"), 1.25)
    np.testing.assert_array_equal(checkpoint.tensor("layers.0.self_attn.q_norm.weight"), 0.5)


def test_the_layers_of_gemma3_see_a_window_but_every_sixth(tmp_path: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(save_model(tmp_path, gemma3()))
    assert windows(checkpoint) == [32] * 5 + [None]
    assert [layer.rope.theta for layer in checkpoint.architecture.attention if layer.rope] == [1e4] * 5 + [1e6]


def test_added_tokens_beyond_the_embedding_are_left_out(folder: Path) -> None:
    """As in Gemma 3 of 270M and 1B: the tokenizer knows a token for pictures, which has no row."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(f"<{index}>", special=True) for index in range(12)])
    tokenizer.save(str(path))  # 41 tokens on 40 rows
    vocabulary = HuggingFaceCheckpoint(folder).vocabulary
    assert vocabulary.size == 40
    assert vocabulary.tokenizer.token_to_id("<10>") == 39 and vocabulary.tokenizer.token_to_id("<11>") is None
    assert max(vocabulary.special_token_ids) == 39


@pytest.mark.parametrize(
    ("context", "factor", "length"), [(None, 1.0, 64), (64, 1.0, 64), (65, 2.0, 65), (256, 2.0, 256)]
)
def test_the_context_decides_between_the_factors_of_longrope(
    tmp_path: Path, context: int | None, factor: float, length: int
) -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = Phi3Config(**SIZES, pad_token_id=None, rope_parameters=parameters, original_max_position_embeddings=64)
    save_model(tmp_path, Phi3ForCausalLM(config))
    facts = HuggingFaceCheckpoint(tmp_path, context=context).architecture
    assert facts.context_length == length
    assert facts.ropes[0].frequency_factors == (factor,) * 8
    assert facts.ropes[0].magnitude == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
    with pytest.raises(CheckpointError, match="a context of 257 tokens is wanted, expected 2 to 256"):
        HuggingFaceCheckpoint(tmp_path, context=257)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "'32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "'num_hidden_layers' is 3, but the weights hold 2 layers"),
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
