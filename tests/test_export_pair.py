"""Target and draft become a pair: what they must share, what is decided, and what the report says of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import edge_spec
from edge_spec.bundle import open_bundle
from edge_spec.errors import CheckpointError, EdgeSpecError
from edge_spec.export import ExportReport, export_pair
from edge_spec.export.recipe import RECIPES, Device
from edge_spec.runtime.model import Model
from tiny_models import (
    CHAT_TEMPLATE,
    EOS,
    IM_END,
    IM_START,
    TOKENS,
    byte_tokenizer,
    random_model,
    save_checkpoint,
)


def checkpoint(folder: Path, tokenizer: Tokenizer | None = None, **options: Any) -> Path:
    changes = {"num_hidden_layers": 1, **options.pop("changes", {})}
    return save_checkpoint(folder, random_model(**changes), tokenizer, **options)


def export(tmp_path: Path, target: Path, draft: Path | None, **options: Any) -> ExportReport:
    return export_pair(target, draft, tmp_path / "bundle", check=False, **options)


def renamed(old: str, new: str) -> Tokenizer:
    """The usual tokenizer with one token called something else."""
    return Tokenizer.from_str(byte_tokenizer().to_str().replace(old, new))


# One tokenizer


# Vocabularies padded to different sizes


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(288, 272), (272, 288), (267, 320)])
def test_padding_never_counts(tmp_path: Path, target_rows: int, draft_rows: int) -> None:
    target = checkpoint(tmp_path / "target", changes={"vocab_size": target_rows})
    draft = checkpoint(tmp_path / "draft", changes={"vocab_size": draft_rows})
    report = export(tmp_path, target, draft, recipe="fp32", draft_recipe="fp32")
    manifest = report.manifest
    assert manifest.vocab_size == TOKENS
    assert manifest.draft is not None
    assert manifest.target.architecture.logits_size == target_rows
    assert manifest.draft.architecture.logits_size == draft_rows
    bundle = open_bundle(report.path)
    for record in (manifest.target, manifest.draft):
        model = Model(bundle, record, ["CPUExecutionProvider"], 16, exact_rows=True)
        assert model.forward([1, 2, 3], [0, 1, 2]).shape == (3, TOKENS)
    said = " ".join(report.notes)
    assert "share one tokenizer of 267 ids" in said
    assert f"padded to {target_rows} and {draft_rows} rows" in said
    assert (f"Ids 267 to {target_rows - 1} are padding and are never sampled" in said) == (target_rows > 267)


def test_a_padding_id_is_neither_emitted_nor_accepted_as_a_prompt(tmp_path: Path) -> None:
    model = random_model(tie_word_embeddings=False, num_hidden_layers=1)
    # One padding row or the other would win by far, if they took part.
    winner = 100 * model.lm_head.weight.data[5]
    model.lm_head.weight.data[TOKENS], model.lm_head.weight.data[TOKENS + 1] = winner, -winner
    assert int(model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax()) >= TOKENS
    target = save_checkpoint(tmp_path / "target", model)
    export(tmp_path, target, target, recipe="fp32", draft_recipe="fp32")
    with edge_spec.load(tmp_path / "bundle") as engine:
        for temperature in (0.0, 5.0):
            tokens = engine.generate([1, 2, 3], max_new_tokens=40, temperature=temperature, seed=1).token_ids
            assert max(tokens) < TOKENS
        with pytest.raises(EdgeSpecError, match="Token id 267 is out of range; this vocabulary has ids 0 to 266"):
            engine.generate([1, TOKENS])


def test_equally_padded_vocabularies_are_not_worth_a_note(tmp_path: Path) -> None:
    target, draft = (checkpoint(tmp_path / name, changes={"vocab_size": TOKENS}) for name in ("target", "draft"))
    assert export(tmp_path, target, draft).notes == ("Target and draft share one tokenizer of 267 ids.",)


# What is decided and recorded


def test_the_usual_recipes_are_w8a8_for_the_target_and_int4_for_the_draft(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    manifest = export(tmp_path, source, source).manifest
    assert manifest.draft is not None
    assert set(manifest.target.recipe.values()) >= {"w8a8", "int8"}
    assert set(manifest.draft.recipe.values()) >= {"int4"}
    assert manifest.target.integer_weights in ("int8", "uint8") and manifest.draft.integer_weights is None


def test_on_cuda_both_are_int4(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    manifest = export(tmp_path, source, source, device="cuda").manifest
    assert manifest.draft is not None and manifest.device == "cuda"
    assert manifest.target.recipe == manifest.draft.recipe
    assert manifest.target.recipe["attention"] == "int4"


def test_integer_weights_go_by_the_formats_whatever_the_recipe_is_called(tmp_path: Path) -> None:
    misnamed = dataclasses.replace(RECIPES["fp32"], name="w8a8")
    assert (
        export(tmp_path, checkpoint(tmp_path / "target"), None, recipe=misnamed).manifest.target.integer_weights is None
    )


def test_the_manifest_tells_what_the_checkpoint_said(tmp_path: Path) -> None:
    changes = {"family": "qwen2", "tie_word_embeddings": False, "max_position_embeddings": 192}
    source = checkpoint(tmp_path / "checkpoint", changes=changes, eos=[IM_END, EOS], chat_template=CHAT_TEMPLATE)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [IM_END, EOS]}
    (source / "generation_config.json").write_text(json.dumps(sampling))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    report = export(tmp_path, source, None)
    manifest, facts = report.manifest, report.manifest.target.architecture
    assert report.path == tmp_path / "bundle"
    assert manifest.created_by == f"edge-spec {edge_spec.__version__}"
    assert (manifest.eos_token_ids, manifest.bos_token_id) == ((EOS, IM_END), IM_START)
    assert manifest.special_token_ids == (EOS, IM_START, IM_END)
    assert manifest.default_sampling == {"temperature": 0.7, "top_p": 0.8}
    assert manifest.draft is None and manifest.context_length == facts.context_length == 192
    assert (facts.family, facts.layers, facts.heads, facts.kv_heads, facts.head_size) == ("qwen2", 1, 4, 2, 16)
    assert not facts.tied_embeddings and not any(rope.scaled for rope in facts.ropes)
    assert manifest.target.source == str(source)
    weights = (source / "model.safetensors").read_bytes()
    assert manifest.target.source_sha256 == hashlib.sha256(weights).hexdigest()
    assert (report.path / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_the_quality_of_every_recipe_is_measured_and_in_order(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", changes={"num_hidden_layers": 2, "hidden_size": 256})
    divergence = {}
    for recipe in ("fp32", "fp16", "w8a8", "int4", "int4-128"):
        quality = export_pair(source, None, tmp_path / recipe, recipe=recipe).manifest.target.quality
        assert quality is not None and quality.tokens == 160
        assert quality.mean_kl <= quality.p95_kl + 1e-9 and 0.2 < quality.top1_agreement <= 1
        divergence[recipe] = quality.mean_kl
    assert abs(divergence["fp32"]) < 1e-6 < divergence["int4"]
    assert divergence["fp32"] < divergence["fp16"] < divergence["w8a8"] < divergence["int4"] < divergence["int4-128"]


@pytest.mark.parametrize(("device", "names"), [("cpu", ("w8a8", "int4-128")), ("cuda", ("int4", "int4"))])
def test_every_device_has_its_own_recipes(tmp_path: Path, device: Device, names: tuple[str, str]) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    manifest = export(tmp_path, source, source, device=device).manifest
    assert manifest.draft is not None
    assert (manifest.target.recipe, manifest.draft.recipe) == tuple(RECIPES[name].to_dict() for name in names)


def test_the_check_can_be_skipped(tmp_path: Path) -> None:
    assert export(tmp_path, checkpoint(tmp_path / "checkpoint"), None).manifest.target.quality is None


def test_the_reference_knows_every_kind_of_layer(tmp_path: Path) -> None:
    # A mistake that the graph and the reference shared would pass; test_transformers_parity finds those.
    rope = {"rope_type": "linear", "factor": 2.0}
    changes = {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope, "num_hidden_layers": 2}
    source = checkpoint(tmp_path / "checkpoint", changes=changes)
    quality = export_pair(source, None, tmp_path / "bundle", recipe="fp32").manifest.target.quality
    assert quality is not None and abs(quality.mean_kl) < 1e-6


def test_exporting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    first, second = (export_pair(source, source, tmp_path / name, check=False) for name in ("first", "second"))
    assert first.manifest == second.manifest


def test_progress_tells_of_every_stage_and_reaches_its_end(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    steps: dict[str, list[tuple[int, int]]] = {}

    def watch(stage: str, done: int, total: int) -> None:
        steps.setdefault(stage, []).append((done, total))

    export_pair(source, source, tmp_path / "bundle", progress=watch)
    assert list(steps) == ["export target", "check target", "export draft", "check draft", "seal"]
    for reports in steps.values():
        assert reports == sorted(reports) and len({total for _, total in reports}) == 1
        assert reports[0][0] == 0 and reports[-1][0] == reports[-1][1]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_source_that_cannot_be_read_leaves_nothing(tmp_path: Path, role: str) -> None:
    sound, broken = checkpoint(tmp_path / "sound"), checkpoint(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    target, draft = (broken, sound) if role == "target" else (sound, broken)
    with pytest.raises(CheckpointError, match="cut short"):
        export(tmp_path, target, draft)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        export(tmp_path, *((tmp_path / "nothing", sound) if role == "target" else (sound, tmp_path / "nothing")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "sound"]


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="Unknown device 'tpu'; expected one of cpu, cuda"):
        export(tmp_path, tmp_path, None, device="tpu")


def test_float32_logits_of_the_bundle_are_the_checkpoints(tmp_path: Path) -> None:
    model = random_model(num_hidden_layers=1)
    bundle = open_bundle(export(tmp_path, save_checkpoint(tmp_path / "target", model), None, recipe="fp32").path)
    actual = Model(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 16, exact_rows=True).forward(
        [4, 5, 6], [2]
    )
    with torch.no_grad():
        expected = model(torch.tensor([[4, 5, 6]])).logits[0, -1:, :TOKENS].numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
