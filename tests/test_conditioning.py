"""Rotated and rescaled weights compute what the checkpoint's do, and lose less when rounded."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.export import export_pair
from edge_spec.export.checkpoint import Checkpoint, open_checkpoint
from edge_spec.export.conditioning import Conditioner
from edge_spec.export.decoder import read_layer
from edge_spec.export.recipe import RECIPES
from edge_spec.export.reference import Float32Reference
from edge_spec.export.rotation import Rotation
from edge_spec.export.smoothing import smoothing_scale
from tiny_models import random_model, save_checkpoint

IDS = np.arange(3, 63, dtype=np.int64) * 7 % 260


def opened(folder: Path, **changes: Any) -> Checkpoint:
    return open_checkpoint(save_checkpoint(folder, random_model(**changes)))


def logits_of(checkpoint: Checkpoint, conditioner: Conditioner | None) -> np.ndarray:
    """Logits of ``IDS`` in float32, through the weights as they are or as they are packed."""
    facts = checkpoint.architecture
    embedding = checkpoint.rows("embed_tokens.weight", 0, facts.vocab_size)
    head = embedding if facts.tied_embeddings else checkpoint.rows("lm_head.weight", 0, facts.vocab_size)
    gain = checkpoint.tensor("norm.weight")
    if conditioner is not None:
        embedding, head = conditioner.embedding_rows(embedding), conditioner.head_rows(head, gain)
        gain = conditioner.final_norm(gain)
    reference = Float32Reference(facts, embedding[IDS])
    for index in range(facts.layers):
        layer = read_layer(checkpoint, index)
        reference.run_layer(layer if conditioner is None else conditioner.layer(layer))
    logits: np.ndarray = reference.final_hidden(gain) @ head.T
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "llama"},
        {"family": "qwen2", "tie_word_embeddings": False},
        {"family": "llama", "attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "intermediate_size": 100},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 45},
    ],
    ids=["llama", "qwen2", "biases", "groups of three", "odd size"],
)
def test_conditioned_weights_compute_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, **changes)
    conditioned = logits_of(checkpoint, Conditioner(checkpoint, RECIPES["w8a8"]))
    np.testing.assert_allclose(conditioned, logits_of(checkpoint, None), atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "int4"])
def test_weights_that_would_not_gain_stay_as_they_are(recipe: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    conditioned = logits_of(checkpoint, Conditioner(checkpoint, RECIPES[recipe]))
    np.testing.assert_array_equal(conditioned, logits_of(checkpoint, None))


@given(st.integers(1, 400))
@settings(deadline=None)
def test_a_rotation_of_any_size_keeps_lengths_and_angles(size: int) -> None:
    rotation = Rotation(size)
    matrix = rotation.rows(np.eye(size, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    x = np.random.default_rng(size).normal(size=(size, 3)).astype(np.float32)
    np.testing.assert_allclose(rotation.columns(x), matrix.T @ x, atol=1e-4)


@pytest.mark.parametrize("size", [576, 896, 1536, 2048, 3584])
def test_a_single_channel_is_spread_over_all(size: int) -> None:
    assert np.abs(Rotation(size).rows(np.eye(size, dtype=np.float32))).max() < 1.5 / np.sqrt(size)


def rounded(rows: np.ndarray) -> np.ndarray:
    step = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-30) / 127
    return np.asarray(np.rint(rows / step) * step)


def error(x: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> float:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return float(np.square(rounded(x / scale) @ rounded(weight * scale).T - x @ weight.T).sum())


@given(st.integers(0, 2**32 - 1), st.floats(0, 3), st.floats(0, 2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rescaling_never_makes_the_error_larger(seed: int, spread: float, tails: float, shared: bool) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(24, 48)) * np.exp(spread * rng.normal(size=48))).astype(np.float32)
    weight = (rng.normal(size=(40, 48)) * np.exp(tails * rng.normal(size=(40, 48)))).astype(np.float32)
    x[:, 5] = 0
    groups = np.tile(np.arange(16), 3) if shared else np.arange(48)
    scale = smoothing_scale(x, weight, groups)
    assert scale.shape == (groups.max() + 1,) and (scale > 0).all() and np.isfinite(scale).all()
    assert error(x, weight, scale[groups]) <= error(x, weight, np.ones(48)) * (1 + 1e-4)


def test_outliers_of_a_channel_are_shared_with_its_weights() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(64, 128)).astype(np.float32), rng.normal(size=(96, 128)).astype(np.float32)
    x[:, [7, 50]] *= 200
    scale = smoothing_scale(x, weight)
    assert error(x, weight, scale) < error(x, weight, np.ones(128)) / 20


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model("qwen2"))
    digests = set()
    for name in ("first", "second"):
        path = export_pair(checkpoint, None, tmp_path / name, recipe="w8a8").path
        digests.add(hashlib.sha256((path / "target" / "model.onnx.data").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_outliers_of_the_residual_stream_cost_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(hidden_size=128)
    # Channels that every norm sees a hundred times larger than the others, as large models have them.
    model.model.embed_tokens.weight.data[:, [3, 70]] *= 100
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model)
    conditioned = export_pair(checkpoint, None, tmp_path / "conditioned", recipe="w8a8").manifest.target.quality
    monkeypatch.setattr("edge_spec.export.model.Conditioner", lambda c, recipe: Conditioner(c, RECIPES["fp32"]))
    monkeypatch.setitem(RECIPES, "w8a8", replace(RECIPES["w8a8"], max_mean_kl=10))
    plain = export_pair(checkpoint, None, tmp_path / "plain", recipe="w8a8").manifest.target.quality
    assert conditioned is not None and plain is not None
    assert conditioned.mean_kl < plain.mean_kl / 2
