"""Multi-token prediction layers: the layouts they are published in become graphs that compute what their code does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import edge_spec
from edge_spec.bundle import open_bundle, read_manifest
from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export import add_head, export_pair
from edge_spec.graph_checks.head_check import check_head_graph
from edge_spec.runtime.model import Model
from head_checkpoints import Tensors, gain, layer_tensors, llama_config, matrix, rms_norm, run_layer, save_head
from head_graph import HeadGraph
from tiny_models import SIZES, TOKENS, random_model, save_checkpoint

HIDDEN, VOCABULARY, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], 2
LAYOUTS = ("deepseek", "qwen", "mimo")
# Of each layout: what is before the layer's names, and the names of its two norms, its projection and its last norm.
NAMES = {
    "deepseek": (f"model.layers.{LAYERS}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("model.mtp_layers.0.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("qwen3", seed=6, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    return save_checkpoint(tmp_path_factory.mktemp("target"), model)


@pytest.fixture(scope="module", params=["fp32", "w8a8", "int4"])
def bundle(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_pair(target, None, tmp_path_factory.mktemp("bundles") / "b", recipe=request.param, check=False).path


def head_of(folder: Path, layout: str, **changes: Any) -> tuple[Path, Tensors]:
    """A checkpoint of the layer alone, and its tensors by plain names."""
    random = torch.Generator().manual_seed(11)
    plain = {
        **layer_tensors(random, HIDDEN, HIDDEN),
        "self_attn.q_norm.weight": gain(random, 16),
        "self_attn.k_norm.weight": gain(random, 16),
        "embedding_norm": gain(random, HIDDEN),
        "hidden_norm": gain(random, HIDDEN),
        "join": matrix(random, HIDDEN, 2 * HIDDEN),
        "final_norm": gain(random, HIDDEN),
    }
    prefix, layer, *others = NAMES[layout]
    names = dict(zip(("embedding_norm", "hidden_norm", "join", "final_norm"), others, strict=True))
    from_one = layout == "qwen"
    stored = {}
    for name, value in plain.items():
        file = f"{prefix}{names[name]}.weight" if name in names else f"{prefix}{layer}{name}"
        stored[file] = value - 1 if from_one and value.ndim == 1 else value
    config = llama_config(HIDDEN, 1, VOCABULARY, num_nextn_predict_layers=1, num_hidden_layers=LAYERS, **changes)
    config["model_type"] = {"deepseek": "qwen3", "qwen": "qwen3_next", "mimo": "mimo"}[layout]
    del config["draft_vocab_size"]
    return save_head(folder, config, stored), plain


@pytest.mark.parametrize(("layout", "recipe"), [*((layout, "fp32") for layout in LAYOUTS), ("deepseek", "w8a8")])
def test_a_layer_computes_what_the_reference_does(
    layout: str, recipe: str, bundle: Path, target: Path, tmp_path: Path
) -> None:
    stored = open_bundle(bundle, verify=False).manifest.target.recipe["name"]
    checkpoint, plain = head_of(tmp_path / "head", layout)
    path = add_head(bundle, checkpoint, output=tmp_path / "bundle", recipe=recipe).path
    opened = open_bundle(path)
    assert opened.manifest.head is not None
    check_head_graph(opened, opened.manifest.head)
    ids = [int(token) for token in np.random.default_rng(7).integers(0, TOKENS, 20)]
    model = Model(opened, opened.manifest.target, ["CPUExecutionProvider"], 64, True, threads=1, taps=(LAYERS,))
    model.forward(ids[:15], (0,))
    assert model.cache.taps is not None
    taps, head = model.cache.taps.read(0, 15), HeadGraph(path)

    weights = load_file(target / "model.safetensors")

    def run(states: torch.Tensor, tokens: list[int]) -> tuple[np.ndarray, torch.Tensor]:
        embedded = rms_norm(weights["model.embed_tokens.weight"][tokens], plain["embedding_norm"])
        pair = [embedded, rms_norm(states, plain["hidden_norm"])]
        if layout == "mimo":
            pair.reverse()
        stream = torch.cat(pair, -1) @ plain["join"].T
        output = run_layer(plain, rms_norm(stream, plain["input_layernorm.weight"]), stream)
        final = rms_norm(output, plain["final_norm"])
        return (final @ weights["lm_head.weight"].T).numpy(), output if layout == "deepseek" else final

    def near(found: np.ndarray, expected: np.ndarray) -> None:
        apart = np.abs(found - expected)
        if stored == recipe == "fp32":
            assert apart.max() < 1e-4 * max(1.0, np.abs(expected).max())
        limit = {"fp32": 1e-4, "w8a8": 0.1, "int4": 0.6}
        assert apart.mean() < max(limit[str(stored)], limit[recipe]) * np.abs(expected).mean()

    states = rms_norm(torch.from_numpy(taps), weights["model.norm.weight"])
    head.call(ids[1:6], taps[:5])
    found, feature = head.call(ids[6:11], taps[5:10])
    expected, features = run(states[:10], ids[1:11])
    near(found, expected[5:])
    for step in range(3):
        found, feature = head.call([ids[11 + step]], None, feature[-1:])
        states_now = torch.cat([states[:10], features[9 : 10 + step]])
        expected, features = run(states_now, ids[1 : 12 + step])
        near(found, expected[-1:])
    head.length = 10
    found, _ = head.call(ids[11:16], taps[10:15])
    near(found, run(states[:15], ids[1:16])[0][10:])


def test_what_a_layer_shares_is_described_as_its_target_stores_it(bundle: Path, tmp_path: Path) -> None:
    """The memory plan counts it by that."""
    path = add_head(bundle, head_of(tmp_path / "head", "mimo")[0], output=tmp_path / "bundle", recipe="int4").path
    manifest = read_manifest(path)
    assert manifest.head is not None
    stored = manifest.head.model.recipe
    assert all(stored[part] == manifest.target.recipe[part] for part in ("embedding", "lm_head"))
    assert stored["attention"] == "int4"


def test_a_copy_of_lm_head_is_the_targets(target: Path, tmp_path: Path) -> None:
    """A whole model's checkpoint, as DeepSeek publishes it, with copies of embedding and lm_head in the layer."""
    checkpoint, _ = head_of(tmp_path / "head", "deepseek")
    own = load_file(checkpoint / "model.safetensors")
    whole = load_file(target / "model.safetensors")
    copies = {"shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
    copied = {f"model.layers.{LAYERS}.{to}.weight": whole[f"{name}.weight"].clone() for to, name in copies.items()}
    save_head(checkpoint, json.loads((checkpoint / "config.json").read_text()), {**whole, **own, **copied})
    path = export_pair(
        target, None, tmp_path / "bundle", recipe="w8a8", head=checkpoint, head_recipe="w8a8", check=False
    ).path
    head = open_bundle(path).manifest.head
    assert head is not None and head.kind == "mtp" and head.taps == (LAYERS,) and not head.names_columns
    # Neither an embedding nor an lm_head of its own: what it has is smaller than one of them in float32.
    assert open_bundle(path).manifest.files["target/head.onnx.data"].bytes < 3 * VOCABULARY * HIDDEN * 4


def test_layers_that_are_not_built_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    path = export_pair(target, None, tmp_path / "bundle", recipe="fp32", check=False).path
    for change, named in (
        ({"n_routed_experts": 8}, "a mixture of experts"),
        ({"q_lora_rank": 8}, "latent attention"),
        ({"attn_output_gate": True}, "gated attention"),
        ({"num_nextn_predict_layers": 2}, "supported is one layer"),
    ):
        checkpoint, _ = head_of(tmp_path / "head", "qwen")
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedError, match=named):
            add_head(path, checkpoint)
    checkpoint, _ = head_of(tmp_path / "moe", "deepseek")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"model.layers.{LAYERS}.mlp.experts.0.gate_proj.weight"] = torch.zeros(4, 4)
    save_head(checkpoint, json.loads((checkpoint / "config.json").read_text()), tensors)
    with pytest.raises(UnsupportedError, match="mixtures of experts"):
        add_head(path, checkpoint)
    with pytest.raises(CheckpointError, match="leave them out"):
        add_head(path, head_of(tmp_path / "taps", "mimo")[0], taps=(1,))
    assert open_bundle(path).manifest.head is None


def test_a_layer_drafts_the_targets_own_text(bundle: Path, tmp_path: Path) -> None:
    path = add_head(bundle, head_of(tmp_path / "head", "deepseek")[0], output=tmp_path / "bundle").path
    with edge_spec.load(path, threads=1) as engine:
        plain = engine.generate(list(range(20)), max_new_tokens=40, speculation="off")
        drafted = engine.generate(list(range(20)), max_new_tokens=40, speculation="head", max_draft=3)
    assert drafted.token_ids == plain.token_ids and drafted.statistics.drafted > 40
