"""Rotated and rescaled weights compute what the checkpoint's do, and lose less when rounded."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.export import export_pair
from edge_spec.export.checkpoint import Checkpoint, open_checkpoint
from edge_spec.export.conditioning import Conditioner
from edge_spec.export.decoder import read_layer
from edge_spec.export.quantize import quantize_blocks, quantize_blocks_by_importance, quantize_blocks_with_zero_points
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
    embedding = checkpoint.rows("embed_tokens.weight", 0, facts.logits_size)
    head = embedding if facts.tied_embeddings else checkpoint.rows("lm_head.weight", 0, facts.logits_size)
    gain = checkpoint.tensor("norm.weight")
    if conditioner is not None:
        embedding, head = conditioner.embedding_rows(embedding), conditioner.head_rows(head, gain)
        gain = conditioner.final_norm(gain)
    reference = Float32Reference(facts, embedding[IDS])
    for index in range(facts.layers):
        layer = read_layer(checkpoint, index)
        reference.run_layer(layer if conditioner is None else conditioner.layer(layer)[0])
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
@pytest.mark.parametrize("recipe", ["w8a8", "int4"])
def test_conditioned_weights_compute_the_same(recipe: str, changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, **changes)
    conditioned = logits_of(checkpoint, Conditioner(checkpoint, RECIPES[recipe]))
    np.testing.assert_allclose(conditioned, logits_of(checkpoint, None), atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
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
    scale = smoothing_scale(x, weight, "w8a8", shared=groups)
    assert scale.shape == (groups.max() + 1,) and (scale > 0).all() and np.isfinite(scale).all()
    assert error(x, weight, scale[groups]) <= error(x, weight, np.ones(48)) * (1 + 1e-4)


@given(st.integers(0, 2**32 - 1), st.floats(0, 3), st.sampled_from([16, 32, 128]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_fitted_blocks_are_never_worse_than_nearest_ones(seed: int, spread: float, size: int, zeros: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(20, 80)).astype(np.float32)
    importance = np.exp(spread * rng.normal(size=80)).astype(np.float32)
    fitted = quantize_blocks_by_importance(weight, importance, size, zeros)
    nearest = quantize_blocks_with_zero_points(weight, size) if zeros else quantize_blocks(weight, 4, size)
    assert [part.shape for part in fitted] == [part.shape for part in nearest]
    errors = [(np.square(restored(parts)[:, :80] - weight) * importance).sum() for parts in (fitted, nearest)]
    assert errors[0] <= errors[1] * (1 + 1e-5)


def test_fitted_blocks_lose_clearly_less_where_inputs_differ() -> None:
    rng = np.random.default_rng(0)
    weight, importance = rng.normal(size=(64, 256)).astype(np.float32), np.exp(2 * rng.normal(size=256))
    fitted = quantize_blocks_by_importance(weight, importance.astype(np.float32), 32, zero_points=True)
    nearest = quantize_blocks_with_zero_points(weight, 32)
    errors = [(np.square(restored(parts) - weight) * importance).sum() for parts in (fitted, nearest)]
    assert errors[0] < 0.75 * errors[1]


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.filterwarnings("error")
def test_blocks_of_extreme_values_are_fitted_without_harm(value: float, zero_points: bool) -> None:
    weight = np.full((3, 64), value, np.float32)
    weight[:, ::2] *= -1
    for importance in (np.zeros(64, np.float32), np.full(64, 1e30, np.float32)):
        values = restored(quantize_blocks_by_importance(weight, importance, 32, zero_points))
        assert (np.abs(values - weight) <= value / 7 + 1e-30).all()


def restored(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Packed blocks as a matrix, float64 [out, padded in]."""
    packed, scale, *zero_points = parts
    nibbles = [
        np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:-1], -1) for part in (packed, *zero_points)
    ]
    zero = nibbles[1][:, : scale.shape[1], None].astype(np.float64) if zero_points else np.float64(8)
    return np.asarray((nibbles[0] - zero) * scale[:, :, None].astype(np.float64)).reshape(len(packed), -1)


def test_outliers_of_a_channel_are_shared_with_its_weights() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(64, 128)).astype(np.float32), rng.normal(size=(96, 128)).astype(np.float32)
    x[:, [7, 50]] *= 200
    scale = smoothing_scale(x, weight, "w8a8")
    assert error(x, weight, scale) < error(x, weight, np.ones(128)) / 20


@pytest.mark.parametrize("recipe", ["w8a8", "int4"])
def test_the_same_checkpoint_gives_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model("qwen2"))
    digests = set()
    for name in ("first", "second"):
        path = export_pair(checkpoint, None, tmp_path / name, recipe=recipe, check=False).path
        digests.add(hashlib.sha256((path / "target" / "model.onnx.data").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("recipe", ["w8a8", "int4", "int4-128"])
def test_conditioning_adds_nothing_to_the_graph(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model("qwen2"))
    graphs = []
    for name in ("conditioned", "plain"):
        path = export_pair(checkpoint, None, tmp_path / name, recipe=recipe, check=False).path
        model = onnx.load(path / "target" / "model.onnx", load_external_data=False)
        nodes = [(node.op_type, list(node.input), list(node.output)) for node in model.graph.node]
        weights = [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in model.graph.initializer]
        graphs.append((nodes, weights))
        monkeypatch.setattr("edge_spec.export.model.Conditioner", lambda c, recipe: Conditioner(c, RECIPES["fp32"]))
    assert graphs[0] == graphs[1]


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
