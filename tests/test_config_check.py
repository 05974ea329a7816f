"""Whatever a config.json says: either the model that transformers makes of it, or an error that names the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.decoder import read_final_norm, read_layer
from edge_spec.export.huggingface import HuggingFaceCheckpoint
from edge_spec.export.reference import Float32Reference
from tiny_models import TOKENS, VARIANTS, random_model, save_checkpoint

TOLERANCE = 2e-3
IDS = np.random.default_rng(7).integers(0, TOKENS, 48)

# Fields that configurations of other kinds have, and those of these families that are not always written.
OTHER_FIELDS = (
    "num_local_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "hidden_activation",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "quantization_config",
    "compression_config",
    "final_logit_softcapping",
    "torch_dtype",
    "text_config",
)
VALUES = st.one_of(
    st.sampled_from([None, True, False, "64", "true", "silu", "nonsense", "", [], ["full_attention"], {}, {"a": 1}]),
    st.integers(-2, 5),
    st.sampled_from([16, 24, 64, 80, 288, 10**9, 10**400, 0.0, 0.5, 1.5, 1e30, -1e-6, float("nan"), float("inf")]),
)


def own_logits(checkpoint: HuggingFaceCheckpoint, tokens: int) -> npt.NDArray[np.float32]:
    """Logits of the first tokens by the reference that exports are measured against, float32 [tokens, vocab]."""
    facts = checkpoint.architecture
    reference = Float32Reference(facts, checkpoint.rows("embed_tokens.weight", 0, facts.logits_size)[IDS[:tokens]])
    for layer in range(facts.layers):
        reference.run_layer(read_layer(checkpoint, layer))
    hidden = reference.final_hidden(read_final_norm(checkpoint))
    logits: npt.NDArray[np.float32] = hidden @ checkpoint.rows("lm_head.weight", 0, facts.logits_size).T
    return logits


def their_logits(folder: Path, tokens: int) -> npt.NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor(IDS[None, :tokens])).logits[0].numpy()
    return logits


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: save_checkpoint(root / name, random_model(**changes)) for name, changes in VARIANTS.items()}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["llama"], tmp_path / "model")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_field_gives_the_model_of_transformers_or_an_error_that_names_it(
    data: st.DataObject, originals: dict[str, Path]
) -> None:
    original = originals[data.draw(st.sampled_from(sorted(VARIANTS)), "family")]
    text = (original / "config.json").read_text()
    config: dict[str, Any] = json.loads(text)
    field = data.draw(st.sampled_from(sorted({*config, *OTHER_FIELDS})), "field")
    value = data.draw(VALUES, "value")
    try:
        edit(original, **{field: value})
        try:
            checkpoint = HuggingFaceCheckpoint(original)
            _ = checkpoint.vocabulary
        except CheckpointError as error:
            complaint = str(error)
            if field not in complaint:
                pytest.fail(f"{field!r} is not named: {complaint}")
            return
        tokens = min(len(IDS), checkpoint.architecture.context_length)
        own = own_logits(checkpoint, tokens)
        if value is None:  # as if it were absent; transformers takes that for a wrong type here and there
            (original / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != field}))
        try:
            expected = their_logits(original, tokens)
        except Exception:  # it is pedantic about types, also of fields that no model depends on
            (original / "config.json").write_text(text)
            expected = their_logits(original, tokens)
    finally:
        (original / "config.json").write_text(text)
    np.testing.assert_allclose(own, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "method", ["fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors", "mxfp4", "some-new-one", None, 3]
)
def test_a_quantized_checkpoint_is_refused_by_its_method(method: object, folder: Path) -> None:
    edit(folder, quantization_config={"quant_method": method})
    with pytest.raises(
        UnsupportedError, match=f"quantized.*quantization_config, quant_method {method!r}.*give the orig"
    ):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("value", ["awq", [1], 4])
def test_a_quantization_that_is_no_object_is_refused_all_the_same(value: object, folder: Path) -> None:
    edit(folder, compression_config=value)
    with pytest.raises(UnsupportedError, match="compression_config"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_local_experts": 8}, "'num_local_experts' is 8, which asks for a mixture of experts"),
        ({"num_experts": 8}, "'num_experts' is 8"),
        (
            {"num_nextn_predict_layers": 1},
            "'num_nextn_predict_layers' is 1, which asks for layers that predict several",
        ),
        ({"kv_lora_rank": 512}, "'kv_lora_rank' is 512, which asks for latent attention"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"hidden_act": 3}, "'hidden_act' is 3"),
        ({"num_key_value_heads": 3}, "'num_attention_heads' is 4 and 'num_key_value_heads' 3.*cannot share"),
        (
            {"head_dim": None, "num_attention_heads": 6},
            "'hidden_size' is 64, which is no multiple of 'num_attention_heads'",
        ),
        (
            {"head_dim": None, "num_attention_heads": 8},
            "'head_dim' is not set, but by 'hidden_size'.*makes|multiples of 16",
        ),
        ({"head_dim": 24}, "'head_dim' is 24.*multiples of 16"),
        ({"head_dim": 32}, "'num_attention_heads' or 'head_dim' or 'hidden_size' does not fit the weights"),
        ({"vocab_size": 287}, r"'vocab_size' or 'hidden_size' does not fit.*\(288, 64\), expected \(287, 64\)"),
        ({"intermediate_size": 81}, "'intermediate_size' or 'hidden_size' does not fit the weights"),
        ({"num_hidden_layers": 1}, "'num_hidden_layers' is 1, but the weights hold 2 layers"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0, expected a whole number from 1"),
        ({"num_hidden_layers": -2}, "'num_hidden_layers' is -2"),
        ({"vocab_size": 1 << 30}, "'vocab_size' is 1073741824, expected at most"),
        ({"attention_bias": True}, "'attention_bias' is True, but the weights lack 'layers.0.self_attn.q_proj.bias'"),
        ({"mlp_bias": True}, "'mlp_bias' is True, but the weights lack"),
        ({"attention_bias": "false"}, "'attention_bias' is 'false', expected true or false"),
        ({"tie_word_embeddings": "true"}, "'tie_word_embeddings' is 'true', expected true or false"),
        ({"tie_word_embeddings": False}, "'tie_word_embeddings' is false, but the weights lack 'lm_head.weight'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral'"),
        ({"rope_parameters": ["linear"]}, r"'rope_parameters' is \['linear'\], expected an object"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "'factor' is '2'"),
        ({"rope_parameters": {"rope_theta": -1}}, "'rope_theta' is -1"),
        ({"rms_norm_eps": 1}, "'rms_norm_eps' is 1, expected a small number"),
        ({"max_position_embeddings": 2.5}, "'max_position_embeddings' is 2.5"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], complaint: str, folder: Path) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "complex7"},
        {"dtype": 16},
        {"num_local_experts": 0},
        {"num_nextn_predict_layers": 0},
        {"quantization_config": {}},
        {"transformers_version": "9.9"},
        {"an_unknown_field": {"of": "no concern"}},
    ],
)
def test_what_no_model_depends_on_is_harmless(changes: dict[str, Any], folder: Path) -> None:
    before = HuggingFaceCheckpoint(folder).architecture
    edit(folder, **changes)
    assert HuggingFaceCheckpoint(folder).architecture == before


def test_a_head_of_its_own_contradicts_tied_embeddings(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, path)
    HuggingFaceCheckpoint(folder)  # the same once more
    head = embedding.clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path)
    with pytest.raises(CheckpointError, match="'tie_word_embeddings' is true, but the weights hold a 'lm_head.weight'"):
        HuggingFaceCheckpoint(folder)
    save_file({**tensors, "lm_head.weight": head[:-1].clone()}, path)
    with pytest.raises(CheckpointError, match="'tie_word_embeddings' is true"):
        HuggingFaceCheckpoint(folder)
    edit(folder, tie_word_embeddings=False)
    save_file({**tensors, "lm_head.weight": head}, path)
    np.testing.assert_array_equal(HuggingFaceCheckpoint(folder).tensor("lm_head.weight"), head.numpy())


def test_biases_that_the_configuration_does_not_speak_of_are_not_left_out(folder: Path) -> None:
    path = folder / "model.safetensors"
    bias = {"model.layers.1.self_attn.v_proj.bias": torch.ones(32)}
    save_file({**load_file(path), **bias}, path)
    with pytest.raises(
        CheckpointError, match="'attention_bias' is False, but the weights hold 'layers.1.self_attn.v_proj"
    ):
        HuggingFaceCheckpoint(folder)


def test_the_part_for_language_is_checked_where_it_is_one_of_several(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(originals["gemma3"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for changes, complaint in (({"num_experts": 4}, "'num_experts'"), ({"vocab_size": 300}, "'vocab_size'")):
        whole = {"model_type": "gemma3", "text_config": {**config, **changes}}
        (folder / "config.json").write_text(json.dumps(whole))
        with pytest.raises(CheckpointError, match=f"text_config of .*{complaint}"):
            HuggingFaceCheckpoint(folder)
