"""EAGLE-3 heads: the layouts they are published in become graphs that compute what their authors' code does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from edge_spec import cli
from edge_spec.bundle import MANIFEST, open_bundle, read_manifest
from edge_spec.errors import BundleError, CheckpointError, UnsupportedError
from edge_spec.export import add_head, export_pair
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.lm_head_rows import lm_head_rows
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.graph_checks.head_check import check_head_graph, read_head_ids
from edge_spec.manifest import HEAD_IDS
from edge_spec.runtime.model import Model
from head_checkpoints import Tensors, eagle3_tensors, llama_config, rms_norm, run_layer, save_head, speculators
from head_graph import HeadGraph
from tiny_models import SIZES, TOKENS, random_model, save_checkpoint

HIDDEN, VOCABULARY, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], 6
TAPS = [2, 4, 5]
# Not in the order of their ids, as heads may have them.
IDS = [int(token) for token in np.random.default_rng(3).permutation(TOKENS)[:100]]


class Reference:
    """The head in torch, over all rows of a text at once: ``states`` [rows, hidden] beside the ids that follow."""

    def __init__(self, tensors: Tensors, embedding: Tensor, **options: bool) -> None:
        self.tensors, self.embedding, self.options = tensors, embedding, options
        self.layer = {name.removeprefix("midlayer."): value for name, value in tensors.items() if "midlayer." in name}

    def fused(self, taps: np.ndarray) -> Tensor:
        states = torch.from_numpy(taps)
        if self.options.get("norm_before_fc"):
            states = rms_norm(states, self.tensors["input_norm.weight"])
        return states @ self.tensors["fc.weight"].T

    def run(self, states: Tensor, ids: list[int]) -> tuple[np.ndarray, Tensor]:
        embedded = rms_norm(self.embedding[ids], self.layer["input_layernorm.weight"])
        normed = rms_norm(states, self.layer["hidden_norm.weight"])
        residual = normed if self.options.get("norm_before_residual") else states
        output = run_layer(self.layer, torch.cat([embedded, normed], -1), residual)
        final = rms_norm(output, self.tensors["norm.weight"])
        return (final @ self.tensors["lm_head.weight"].T).numpy(), final if self.options.get("norm_output") else output


def in_id_order(logits: np.ndarray) -> np.ndarray:
    return logits[:, np.argsort(IDS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), random_model(seed=4, num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def embedding(target: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, written = tmp_path_factory.mktemp("bundles"), {}

    def exported(recipe: str) -> Path:
        if recipe not in written:
            written[recipe] = export_pair(target, None, folder / recipe, recipe=recipe, check=False).path
        return written[recipe]

    return exported


def head_of(folder: Path, options: dict[str, Any] | None = None) -> tuple[Path, Tensors]:
    tensors = eagle3_tensors(HIDDEN, IDS, VOCABULARY)
    config = llama_config(HIDDEN, len(IDS), VOCABULARY)
    if options is None:
        return save_head(folder, {**config, "eagle_aux_hidden_state_layer_ids": TAPS}, tensors), tensors
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(8))
    written = speculators(config, tensors, eagle_aux_hidden_state_layer_ids=TAPS, **options)
    return save_head(folder, *written), tensors


LAYOUTS = {
    "specforge": None,
    "speculators": {"norm_before_residual": False},
    "speculators, normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_lm_head_has_the_rows_of_its_targets(tied: bool, tmp_path: Path) -> None:
    model = random_model(seed=4, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    target = save_checkpoint(tmp_path / "target", model)
    bundle = export_pair(target, None, tmp_path / "bare", recipe="fp32", check=False).path
    checkpoint, tensors = head_of(tmp_path / "head")
    tensors["lm_head.weight"] = model.lm_head.weight.detach()[IDS]
    kept = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    config = json.loads((checkpoint / "config.json").read_text())
    shared = save_head(tmp_path / "shared", config, kept)
    head = HeadGraph(add_head(bundle, shared, output=tmp_path / "bundle", recipe="fp32").path)
    reference = Reference(tensors, model.model.embed_tokens.weight.detach())
    taps = np.random.default_rng(5).normal(size=(4, 3 * HIDDEN)).astype(np.float32)
    found, _ = head.call([3, 1, 4, 1], taps)
    expected, _ = reference.run(reference.fused(taps), [3, 1, 4, 1])
    assert np.abs(found - in_id_order(expected)).max() < 1e-4

    moved = target.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="the head needs the lm_head of its target"):
        add_head(bundle, shared, output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    command = ["export", "--bundle", str(bundle), "--output", str(tmp_path / "other")]
    assert cli.main([*command, "--head", str(shared), "--target", str(moved), "--head-recipe", "fp32"]) == 0
    manifest = read_manifest(tmp_path / "other")
    assert manifest.target.source == str(moved)
    assert np.array_equal(HeadGraph(tmp_path / "other").call([3, 1, 4, 1], taps)[0], found)


def test_a_target_that_is_named_is_looked_at_even_if_the_head_has_all(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", random_model(seed=4, num_hidden_layers=LAYERS))
    alike = save_checkpoint(tmp_path / "alike", random_model(seed=5, num_hidden_layers=LAYERS))
    bundle = export_pair(target, None, tmp_path / "bundle", recipe="fp32", check=False).path
    head, _ = head_of(tmp_path / "head")
    before = (bundle / MANIFEST).read_bytes()
    for named, message in ((tmp_path / "nowhere", "which this bundle was made of"), (alike, "is not what this bundle")):
        with pytest.raises(CheckpointError, match=message):
            add_head(bundle, head, target=named)
    assert (bundle / MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
    ("columns", "message"), [(None, "nothing says which"), (10**9, "to propose 1,000,000,000 ids with its target's")]
)
def test_a_head_without_lm_head_says_which_rows_it_wants(columns: int | None, message: str, tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", random_model(seed=4, num_hidden_layers=LAYERS))
    bundle = export_pair(target, None, tmp_path / "bundle", recipe="fp32", check=False).path
    checkpoint, tensors = head_of(tmp_path / "head")
    config = json.loads((checkpoint / "config.json").read_text())
    config["draft_vocab_size"] = columns or len(IDS)
    kept = {name: value for name, value in tensors.items() if name not in ("lm_head.weight", "d2t")}
    with pytest.raises(CheckpointError, match=message):
        add_head(bundle, save_head(tmp_path / "shared", config, kept))


def test_rows_beyond_the_lm_head_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path / "target", random_model()))
    size = checkpoint.architecture.logits_size
    for ids in ([0, size], [-1, 3]):
        with pytest.raises(ValueError, match=f"expected 0 to {size - 1}"):
            lm_head_rows(checkpoint, np.array(ids))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("stored", "recipe", "error"),
    [("fp32", "fp32", 1e-4), ("w8a8", "fp32", 0.02), ("w8a8", "w8a8", 0.1), ("int4", "int4", 0.7)],
)
def test_a_head_computes_what_the_reference_does(
    layout: str, stored: str, recipe: str, error: float, bundle: Any, embedding: Tensor, tmp_path: Path
) -> None:
    options = LAYOUTS[layout]
    checkpoint, tensors = head_of(tmp_path / "head", options)
    path = add_head(bundle(stored), checkpoint, output=tmp_path / "bundle", recipe=recipe).path
    head, reference = HeadGraph(path), Reference(tensors, embedding, **(options or {}))
    random = np.random.default_rng(5)
    taps = random.normal(size=(20, 3 * HIDDEN)).astype(np.float32)
    ids = [int(token) for token in random.integers(0, TOKENS, 30)]

    def near(found: np.ndarray, expected: np.ndarray, feature: bool = False) -> None:
        if feature and recipe == "w8a8":  # in a basis of the head's own
            found, expected = (np.linalg.norm(rows, axis=-1) for rows in (found, expected))
        scale = max(1.0, float(np.abs(expected).mean()))
        assert np.abs(found - expected).mean() < error * scale
        if recipe == stored == "fp32":
            assert np.abs(found - expected).max() < error * scale

    # A prompt in two pieces, then a chain of own features.
    head.call(ids[:7], taps[:7])
    found, feature = head.call(ids[7:12], taps[7:12])
    states = reference.fused(taps[:12])
    expected, features = reference.run(states, ids[:12])
    near(found, in_id_order(expected)[7:])
    near(feature, features[7:].numpy(), feature=True)
    for step in range(12, 15):
        found, feature = head.call([ids[step]], None, feature[-1:], every=False)
        states = torch.cat([states, features[-1:]])
        expected, features = reference.run(states, ids[: step + 1])
        near(found, in_id_order(expected)[-1:])
        near(feature, features[-1:].numpy(), feature=True)
    # Two of the drafted rows were rejected: the target's own states come in their place, with a feature behind them.
    head.length = 12
    found, feature = head.call([*ids[20:24], ids[25]], taps[12:16], feature)
    states = torch.cat([reference.fused(taps[:16]), features[-1:]])
    expected, features = reference.run(states, [*ids[:12], *ids[20:24], ids[25]])
    near(found, in_id_order(expected)[12:])
    # Rows were missed: the head begins anew, at position 0.
    head.length = 0
    found, _ = head.call(ids[16:20], taps[16:20])
    expected, _ = reference.run(reference.fused(taps[16:20]), ids[16:20])
    near(found, in_id_order(expected))


def test_columns_are_in_the_order_of_their_ids(bundle: Any, tmp_path: Path) -> None:
    path = add_head(bundle("fp32"), head_of(tmp_path / "head")[0], output=tmp_path / "bundle", recipe="fp32").path
    head = open_bundle(path).manifest.head
    assert head is not None and head.names_columns
    assert np.frombuffer((path / HEAD_IDS).read_bytes(), "<u4").tolist() == sorted(IDS)


@pytest.mark.parametrize("stored", ["fp32", "w8a8"])
def test_from_the_targets_own_hidden_states(stored: str, bundle: Any, target: Path, tmp_path: Path) -> None:
    """End to end: what the target's graphs tell is what the authors' code would give the head."""
    from transformers import AutoModelForCausalLM

    checkpoint, tensors = head_of(tmp_path / "head")
    path = add_head(bundle(stored), checkpoint, output=tmp_path / "bundle", recipe="fp32").path
    opened = open_bundle(path)
    assert opened.manifest.head is not None
    model = Model(opened, opened.manifest.target, ["CPUExecutionProvider"], 64, True, threads=1, taps=tuple(TAPS))
    ids = [int(token) for token in np.random.default_rng(7).integers(0, TOKENS, 16)]
    model.forward(ids[:9], (0,))
    model.forward(ids[9:15], (0,))
    assert model.cache.taps is not None
    found, _ = HeadGraph(path).call(ids[1:16], model.cache.taps.read(0, 15))

    original = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32)
    with torch.no_grad():
        states = original(torch.tensor([ids]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap][0, :15] for tap in TAPS], -1).numpy()
    reference = Reference(tensors, original.get_input_embeddings().weight.detach())
    expected, _ = reference.run(reference.fused(taps), ids[1:16])
    limit = 1e-3 if stored == "fp32" else 0.1
    assert np.abs(found - in_id_order(expected)).mean() < limit * np.abs(expected).mean()


def test_taps_are_what_the_configuration_says_they_are(bundle: Any, tmp_path: Path) -> None:
    """A list of its own counts the layers before a hidden state, one in ``eagle_config`` numbers the layer it is of."""
    tensors, config = eagle3_tensors(HIDDEN, IDS, VOCABULARY), llama_config(HIDDEN, len(IDS), VOCABULARY)
    listed = "eagle_aux_hidden_state_layer_ids"
    for change, given, expected in (
        ({listed: [1, 2, 6]}, None, (1, 2, 6)),
        ({"eagle_config": {listed: [1, 2, 5]}}, None, (2, 3, 6)),
        ({listed: [1, 2, 6]}, (2, 4, 5), (2, 4, 5)),
    ):
        head = save_head(tmp_path / "head", {**config, **change}, tensors)
        manifest = add_head(bundle("fp32"), head, output=tmp_path / "b", taps=given, overwrite=True).manifest
        assert manifest.head is not None and manifest.head.taps == expected
        assert all(graph.taps == expected for graph in manifest.target.graphs)
    # Without a word of it, layers 2, L // 2 and L - 3, of which this target of six has two in one.
    with pytest.raises(CheckpointError, match=r"behind \[2, 3, 3\] of the target's layers"):
        add_head(bundle("fp32"), save_head(tmp_path / "head", config, tensors), output=tmp_path / "other")


def test_taps_in_any_order_are_read_in_the_order_of_the_weights(bundle: Any, tmp_path: Path) -> None:
    """A head whose weights take the hidden states in another order is the same head with its columns moved."""
    tensors, config = eagle3_tensors(HIDDEN, IDS, VOCABULARY), llama_config(HIDDEN, len(IDS), VOCABULARY)
    listed = "eagle_aux_hidden_state_layer_ids"
    first = save_head(tmp_path / "first", {**config, listed: [2, 4, 5]}, tensors)
    moved = torch.cat([tensors["fc.weight"].split(HIDDEN, 1)[index] for index in (2, 0, 1)], 1)
    second = save_head(tmp_path / "second", {**config, listed: [5, 2, 4]}, {**tensors, "fc.weight": moved})
    taps = np.random.default_rng(1).normal(size=(5, 3 * HIDDEN)).astype(np.float32)
    found = [
        HeadGraph(add_head(bundle("fp32"), head, output=tmp_path / head.name / "b", recipe="fp32").path).call(
            [1, 2, 3, 4, 5], taps
        )[0]
        for head in (first, second)
    ]
    assert np.array_equal(*found)


def test_an_embedding_of_its_own_is_stored_only_if_it_differs(bundle: Any, embedding: Tensor, tmp_path: Path) -> None:
    tensors, config = eagle3_tensors(HIDDEN, IDS, VOCABULARY), llama_config(HIDDEN, len(IDS), VOCABULARY)
    config["eagle_aux_hidden_state_layer_ids"] = TAPS
    other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    sizes, random = [], np.random.default_rng(1)
    for own in (embedding, other):
        head = save_head(tmp_path / "head", config, {**tensors, "embed_tokens.weight": own})
        report = add_head(bundle("w8a8"), head, output=tmp_path / "b", recipe="fp32", overwrite=True)
        sizes.append(report.manifest.files["target/head.onnx.data"].bytes)
        assert report.manifest.head is not None
        check_head_graph(open_bundle(report.path), report.manifest.head)
        taps = random.normal(size=(5, 3 * HIDDEN)).astype(np.float32)
        found, _ = HeadGraph(report.path).call([5, 6, 7, 8, 9], taps)
        reference = Reference(tensors, own)
        expected, _ = reference.run(reference.fused(taps), [5, 6, 7, 8, 9])
        assert np.abs(found - in_id_order(expected)).mean() < 0.02 * np.abs(expected).mean()
    assert sizes[1] >= sizes[0] + VOCABULARY * HIDDEN


def test_what_is_no_head_for_the_target_is_refused(bundle: Any, tmp_path: Path) -> None:
    path = bundle("fp32")
    before = (path / "manifest.json").read_bytes()
    config = {**llama_config(HIDDEN, len(IDS), VOCABULARY), "eagle_aux_hidden_state_layer_ids": TAPS}

    def changed(name: str, value: Tensor | None) -> Tensors:
        tensors = {**eagle3_tensors(HIDDEN, IDS, VOCABULARY), name: value}
        return {name: value for name, value in tensors.items() if value is not None}

    d2t = eagle3_tensors(HIDDEN, IDS, VOCABULARY)["d2t"]
    far, twice = d2t.clone(), d2t.clone()
    far[7], twice[1] = VOCABULARY, d2t[0] - 1
    for name, value, message in (
        ("norm.weight", None, r"lacks tensor 'norm.weight'"),
        ("midlayer.self_attn.k_proj.weight", None, r"lacks tensor 'midlayer.self_attn.k_proj.weight'"),
        ("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN), r"shape \[64, 128\], expected \[64, 192\]"),
        ("lm_head.weight", torch.full((len(IDS), HIDDEN), torch.nan), "infinite or not a number"),
        ("d2t", far, "'d2t' gives column 7 the id 295, but the target's ids are 0 to 266"),
        ("d2t", twice, "'d2t' gives two columns the id"),
        ("d2t", d2t[:-1], r"shape \[99\], expected \[100\]"),
        ("embed_tokens.weight", torch.zeros(9, HIDDEN), "the embedding has 9 rows, but the target has 267 ids"),
        ("fc.bias", torch.zeros(HIDDEN), "'fc.bias', which no EAGLE-3 head has"),
        ("midlayer.mlp.experts.0.weight", torch.zeros(2, 2), "mixtures of experts"),
    ):
        head = save_head(tmp_path / "head", config, changed(name, value))
        with pytest.raises((CheckpointError, UnsupportedError), match=message):
            add_head(path, head)
    good = eagle3_tensors(HIDDEN, IDS, VOCABULARY)
    for change, message in (
        ({"hidden_size": 32}, "supported are heads as wide as their target"),
        ({"num_attention_heads": "many"}, "expected a whole number"),
        ({"num_hidden_layers": 2}, "supported are heads of one"),
        ({"fc_norm": True}, "'fc_norm' is set"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, r"behind \[2, 4, 7\]"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "expected a list"),
        ({"eagle_config": 3}, "expected an object"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by AWQ"),
    ):
        with pytest.raises((CheckpointError, UnsupportedError), match=message):
            add_head(path, save_head(tmp_path / "head", {**config, **change}, good))
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        add_head(path, tmp_path / "head")
    with pytest.raises(CheckpointError, match="no head at"):
        add_head(path, tmp_path / "nowhere")
    assert (path / "manifest.json").read_bytes() == before and sorted(path.parent.glob(".*partial*")) == []


def test_a_head_replaces_the_one_before(bundle: Any, tmp_path: Path) -> None:
    path, (checkpoint, _) = tmp_path / "b", head_of(tmp_path / "head")
    original = bundle("w8a8")
    assert open_bundle(add_head(original, checkpoint, output=path).path).manifest.head is not None
    weights = (path / "target/model.onnx.data").stat()
    config = llama_config(HIDDEN, VOCABULARY, VOCABULARY, eagle_aux_hidden_state_layer_ids=[1, 6])
    full = eagle3_tensors(HIDDEN, range(VOCABULARY), VOCABULARY, taps=2)
    del full["d2t"], full["t2d"], config["draft_vocab_size"]
    manifest = add_head(path, save_head(tmp_path / "full", config, full)).manifest
    opened = open_bundle(path)  # which compares every hash
    assert opened.manifest == manifest and manifest.head is not None
    assert manifest.head.taps == (1, 6) and not manifest.head.names_columns and HEAD_IDS not in manifest.files
    check_head_graph(opened, manifest.head)
    for graph in manifest.target.graphs:
        check_graph(opened, manifest.target, graph)
    # What did not change was neither copied nor lost.
    assert (path / "target/model.onnx.data").stat().st_ino == weights.st_ino
    assert open_bundle(original).manifest.head is None


def test_a_killed_process_leaves_the_bundle_as_it_was(bundle: Any, tmp_path: Path) -> None:
    path, (checkpoint, _) = tmp_path / "b", head_of(tmp_path / "head")
    before = add_head(bundle("fp32"), checkpoint, output=path).manifest
    for stage in ("export head", "seal"):
        code = (
            "import os, sys; from edge_spec.export import add_head\n"
            "def kill(stage, done, total): stage == sys.argv[3] and done == total - 1 and os.kill(os.getpid(), 9)\n"
            "add_head(sys.argv[1], sys.argv[2], recipe='fp32', taps=(1, 2, 3), progress=kill)"
        )
        killed = subprocess.run([sys.executable, "-c", code, path, checkpoint, stage], check=False)
        assert killed.returncode == -9
        assert open_bundle(path).manifest == before
    after = add_head(path, checkpoint, taps=(1, 2, 3)).manifest
    assert after.head is not None and after.head.taps == (1, 2, 3) and open_bundle(path).manifest == after
    assert [entry.name for entry in tmp_path.iterdir() if ".partial" in entry.name] == []


def test_a_graph_that_reads_beyond_its_weights_is_refused(bundle: Any, tmp_path: Path) -> None:
    path = add_head(bundle("fp32"), head_of(tmp_path / "head")[0], output=tmp_path / "b", recipe="fp32").path
    opened = open_bundle(path)
    head = opened.manifest.head
    assert head is not None
    check_head_graph(opened, head)
    file = path / head.model.graphs[0].path
    good = onnx.load(file, load_external_data=False)
    for node in good.graph.node:
        bad = onnx.ModelProto()
        bad.CopyFrom(good)
        index = list(good.graph.node).index(node)
        # Another input of the same type, or a kind of node that no graph has.
        bad.graph.node[index].op_type = "Relu"
        file.write_bytes(bad.SerializeToString())
        with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
            check_head_graph(opened, head)
    bad = onnx.ModelProto()
    bad.CopyFrom(good)
    (gather,) = (node for node in bad.graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    gather.input[0] = next(tensor.name for tensor in bad.graph.initializer if tensor.name.endswith("lm_head.weight"))
    file.write_bytes(bad.SerializeToString())
    with pytest.raises(BundleError, match="does not fit its inputs"):
        check_head_graph(opened, head)
    (path / HEAD_IDS).write_bytes(np.arange(len(IDS), 0, -1).astype("<u4").tobytes())
    with pytest.raises(BundleError, match="ascending and below 267"):
        read_head_ids(opened, head)


@pytest.mark.parametrize(("stored", "recipe"), [("fp16", "fp16"), ("int4", "fp16"), ("int4", "int4")])
def test_heads_for_cuda_are_in_float16(stored: str, recipe: str, target: Path, tmp_path: Path) -> None:
    path = export_pair(
        target,
        None,
        tmp_path / "b",
        recipe=stored,
        device="cuda",
        head=head_of(tmp_path / "head")[0],
        head_recipe=recipe,
        check=False,
    ).path
    opened = open_bundle(path)
    assert opened.manifest.head is not None
    graph = check_head_graph(opened, opened.manifest.head)
    assert {graph.inputs[name].dtype for name in ("taps", "features")} == {onnx.TensorProto.FLOAT16}
    assert graph.outputs["logits"].dtype == onnx.TensorProto.FLOAT


def test_the_command_gives_a_bundle_a_head(bundle: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, (checkpoint, _) = tmp_path / "b", head_of(tmp_path / "head")
    command = ["export", "--bundle", str(bundle("fp32")), "--head", str(checkpoint), "--json"]
    assert cli.main([*command, "--output", str(path), "--taps", "1,2,3", "--head-recipe", "int4"]) == 0
    head = json.loads(capsys.readouterr().out)["head"]
    assert head["taps"] == [1, 2, 3] and head["model"]["recipe"]["name"] == "int4"
    assert cli.main([*command, "--output", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    for wrong, said in (
        ([*command, "--draft", "x"], "give --head or --draft, not both"),
        ([*command, "--context", "64"], "--bundle is there already; leave out --context"),
        (["export", "--bundle", str(path)], "give --head"),
        (["export", "--target", "x", "--output", "y", "--head-recipe", "fp32"], "--head-recipe is about a head"),
        ([*command, "--taps", "1,x"], "names no layers, expected numbers such as 2,15,27"),
    ):
        with pytest.raises(SystemExit):
            cli.main(wrong)
        assert said in capsys.readouterr().err
