"""Medusa heads: what the graph computes, which place each head speaks of, and that no text changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_heads import ReferenceHeads, random_heads, save_heads

import edge_spec
from edge_spec.bundle import Bundle, new_bundle, open_bundle
from edge_spec.errors import BundleError, CheckpointError, EdgeSpecError, ProviderError, UnsupportedError
from edge_spec.export import export_pair
from edge_spec.export.add_head import add_head
from edge_spec.export.heads.head_folder import open_head_folder
from edge_spec.export.heads.medusa_checkpoint import MedusaCheckpoint
from edge_spec.export.heads.write_medusa import write_medusa
from edge_spec.export.progress import silent
from edge_spec.export.recipe import RECIPES
from edge_spec.manifest import HEAD_IDS
from edge_spec.manifest_check import check_manifest
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.medusa import MedusaDrafter
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.loop import decode, prefill
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import FixedDraft
from edge_spec.runtime.tap_rows import TapRows
from edge_spec.runtime.verification import RULES
from stub_model import context_of
from tiny_models import SIZES, TOKENS, random_model, save_checkpoint

HEADS, LAYERS = 4, 2
HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]
CPU = ["CPUExecutionProvider"]


class Pair:
    """A target with heads, exported; and both as torch has them.

    Where they are fitted, the heads' lm_heads are made of texts of the target, so that now and then they are right.
    """

    def __init__(self, folder: Path, family: str = "llama", fitted: bool = False, **changes: Any) -> None:
        self.target = random_model(family, seed=5, **changes)
        self.checkpoint = save_checkpoint(folder / "target", self.target, eos=None)
        self.tensors = random_heads(HEADS, LAYERS, HIDDEN, VOCAB)
        if fitted:
            self._fit()
        self.heads = save_heads(folder / "heads", self.tensors, medusa_num_heads=HEADS, medusa_num_layers=LAYERS)
        self.bundle = with_heads(self.checkpoint, self.heads, folder / "bundle")

    def states(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states behind the target's final norm, float32 [tokens, hidden]."""
        with torch.no_grad():
            return self.target.model(torch.tensor([tokens])).last_hidden_state[0]

    def reference(self, tokens: list[int]) -> np.ndarray:
        """What the heads say behind each token, float32 [heads, tokens, vocab]."""
        return ReferenceHeads(self.tensors, HEADS, LAYERS)(self.states(tokens))

    def _fit(self) -> None:
        """Head h is asked after token p for what the target says behind token p + 1 + h."""
        texts = torch.tensor([[start, 40 + start] for start in range(6)])
        with torch.no_grad():
            for _ in range(60):
                likeliest = self.target(texts).logits[:, -1, :TOKENS].argmax(dim=1, keepdim=True)
                texts = torch.cat([texts, likeliest], dim=1)
        count = texts.shape[1] - 1 - HEADS
        states = torch.cat([self.states(text.tolist())[:count] for text in texts])
        wanted = [texts[:, 2 + head :][:, :count].reshape(-1).numpy() for head in range(HEADS)]
        maps = {f"{head}.{LAYERS}.weight": torch.eye(HIDDEN) for head in range(HEADS)}
        features = ReferenceHeads({**self.tensors, **maps}, HEADS, LAYERS)(states)
        for head in range(HEADS):
            hot = np.eye(VOCAB, dtype=np.float32)[wanted[head]] * 9
            fitted = np.linalg.lstsq(features[head], hot, rcond=0.02)[0]
            self.tensors[f"{head}.{LAYERS}.weight"] = torch.tensor(fitted.T)


def load(bundle: Bundle) -> tuple[Model, MedusaHeads, DraftVocabulary]:
    head = bundle.manifest.head
    assert head is not None
    target = Model(bundle, bundle.manifest.target, CPU, 160, True, threads=1, taps=head.taps)
    ids = np.fromfile(bundle.path / HEAD_IDS, "<u4").astype(np.int64) if head.names_columns else None
    vocabulary = WHOLE if ids is None else DraftVocabulary(ids, TOKENS)
    return target, MedusaHeads(bundle, head, CPU, threads=1), vocabulary


def with_heads(checkpoint: Path, heads: Path, output: Path, recipe: str = "fp32") -> Bundle:
    """Export a target, and add heads to it."""
    export_pair(checkpoint, None, output, recipe=recipe, check=False)
    add_head(output, heads, recipe=recipe)
    return open_bundle(output)


def trimmed(bundle: Bundle, heads: Path, ids: np.ndarray, output: Path) -> Bundle:
    """The bundle with heads that propose some ids only."""
    with new_bundle(output) as (folder, seal):
        for name in bundle.manifest.files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((bundle.path / name).read_bytes())
        manifest = bundle.manifest
        found = MedusaCheckpoint(open_head_folder(heads), manifest.target.architecture)
        graph, weights = folder / "target/head.onnx", folder / "target/head.onnx.data"
        record = write_medusa(found, manifest, graph, weights, RECIPES["fp32"], silent, ids)
        seal(replace(manifest, files={}, head=record))
    return open_bundle(output)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("medusa"), fitted=True)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return [int(token) for token in np.random.default_rng(4).integers(0, TOKENS, 24)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite"])
def test_the_graph_says_what_the_published_heads_say(family: str, tmp_path: Path, text: list[int]) -> None:
    changes = {"logits_scaling": 0.5} if family == "granite" else {}
    pair = Pair(tmp_path, family, **changes)
    target, heads, _ = load(pair.bundle)
    target.forward(text, (0,))
    expected = pair.reference(text)
    assert (heads.count, heads.columns) == (HEADS, TOKENS)
    for row in (0, 7, len(text) - 1):
        logits = heads.logits(target.cache.taps.read(row, row + 1))
        assert np.abs(logits - expected[:, row, :TOKENS]).max() < 1e-4


@pytest.mark.parametrize(("recipe", "error"), [("fp16", 1e-2), ("w8a8", 0.1), ("int4", 0.5)])
def test_every_recipe_stores_heads(recipe: str, error: float, pair: Pair, tmp_path: Path, text: list[int]) -> None:
    bundle = with_heads(pair.checkpoint, pair.heads, tmp_path / "bundle", recipe)
    heads = MedusaHeads(bundle, bundle.manifest.head, CPU, threads=1)
    normed: list[torch.Tensor] = []
    hook = pair.target.model.norm.register_forward_pre_hook(lambda module, given: normed.append(given[0]))
    pair.states(text)
    hook.remove()
    expected = pair.reference(text)[:, 5, :TOKENS]
    difference = np.abs(heads.logits(normed[0][0, 5:6].numpy()) - expected)
    assert difference.mean() < error * np.abs(expected).mean()


def test_a_trimmed_vocabulary_names_its_columns(pair: Pair, tmp_path: Path, text: list[int]) -> None:
    ids = np.sort(np.random.default_rng(8).permutation(TOKENS)[:100])
    target, heads, vocabulary = load(trimmed(pair.bundle, pair.heads, ids, tmp_path / "bundle"))
    target.forward(text[:-1], (0,))
    expected = pair.reference(text[:-1])[:, -1]
    drafter = MedusaDrafter(heads, target, vocabulary=vocabulary)
    drafted = drafter.propose(context_of(text, SamplingParams(temperature=0.0)), Budget(HEADS))
    assert drafted.tokens == tuple(ids[expected[:, ids].argmax(axis=1)])


class CountingHeads:
    """Heads that are right about a text in which token p is p: head h says h + 2 more than the state's token."""

    count = 4

    def logits(self, state: np.ndarray) -> np.ndarray:
        assert state.shape == (1, 1)
        logits = np.zeros((self.count, 64), np.float32)
        for head in range(self.count):
            logits[head, int(state[0, 0]) + 2 + head] = 6.0
        return logits


class Remembered:
    """A target that tells of each token in its cache that token itself."""

    def __init__(self, cached: list[int], forgotten: int = 0) -> None:
        self.cache = self
        self.taps = TapRows(1, 64)
        self.taps.append(0, [np.array(cached, np.float32)[:, None]])
        self.taps.release(forgotten)


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 5), st.integers(1, 8), st.booleans())
def test_each_head_speaks_of_its_own_place(length: int, proposed: int, most: int, branches: bool) -> None:
    text = list(range(length))
    target: Any = Remembered(text[:-1])  # the last token is pending
    drafter = MedusaDrafter(CountingHeads(), target)  # type: ignore[arg-type]
    prefix = list(range(length, length + proposed))
    drafted = drafter.propose(context_of(text, SamplingParams(temperature=0.0)), Budget(most, branches), prefix)
    trunk = drafted.tokens[: drafted.trunk]
    chain = min(most, max(0, CountingHeads.count - proposed))
    assert trunk == tuple(range(length + proposed, length + proposed + len(trunk)))
    assert len(drafted) <= most and (len(drafted) == chain if not branches else bool(drafted) == (chain > 0))


def test_a_state_that_is_not_there_means_no_proposal() -> None:
    context = context_of([0, 1, 2, 3], SamplingParams(temperature=0.0))
    for target in (Remembered([0, 1]), Remembered([0, 1, 2], forgotten=3), Remembered([])):
        drafter = MedusaDrafter(CountingHeads(), target)  # type: ignore[arg-type]
        assert len(drafter.propose(context, Budget(4))) == 0


def generated(
    pair: Pair, drafting: str, params: SamplingParams, rule: str = "coupled", defer: bool = True
) -> tuple[list[int], int, int]:
    """A text, and how many tokens of it were drafted and accepted."""
    target, heads, vocabulary = load(pair.bundle)
    speculation = None
    if drafting != "plain":
        speculation = FixedDraft(MedusaDrafter(heads, target, vocabulary=vocabulary), 7, drafting == "tree")
    context = context_of([3, 43, 7], params, rule)
    for _ in prefill(target, context):
        pass
    rounds = list(decode(target, speculation, context, RULES[rule], 90, defer))
    return context.tokens, sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafting", ["chain", "tree"])
def test_heads_change_no_token(pair: Pair, drafting: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11 if temperature else None)
    plain, _, _ = generated(pair, "plain", params)
    text, drafted, accepted = generated(pair, drafting, params)
    assert text == plain
    assert 0 < accepted < drafted


def test_a_tree_accepts_more_than_its_chain(pair: Pair) -> None:
    params = SamplingParams(temperature=0.8, seed=2)
    _, _, chain = generated(pair, "chain", params, defer=False)
    _, _, tree = generated(pair, "tree", params, defer=False)
    assert tree > chain


@pytest.mark.parametrize("verification", ["coupled", "traversal"])
def test_an_engine_drafts_with_heads_and_writes_the_same_text(pair: Pair, verification: str) -> None:
    engine = edge_spec.load(pair.bundle.path, threads=1, context=160)
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
        asked = {"max_new_tokens": 60, "verification": verification, **options}
        written = engine.generate([3, 43, 7], speculation="head", max_draft=4, **asked)
        assert 0 < written.statistics.accepted < written.statistics.drafted
        if verification == "coupled" or options["temperature"] == 0.0:
            assert written.token_ids == engine.generate([3, 43, 7], speculation="off", **asked).token_ids
            assert written.token_ids == engine.generate([3, 43, 7], **asked).token_ids


# Checkpoints that are not what they should be


def changed(
    pair: Pair, folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None, **config: Any
) -> MedusaCheckpoint:
    tensors = dict(pair.tensors)
    change(tensors)
    told = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "some/target", **config}
    return read(save_heads(folder, tensors, **told), pair)


def read(folder: Path, pair: Pair) -> MedusaCheckpoint:
    """Read all of some heads."""
    found = MedusaCheckpoint(open_head_folder(folder), pair.bundle.manifest.target.architecture)
    for head in range(found.heads):
        for layer in range(found.layers):
            found.block(head, layer)
        found.lm_head_rows(head, 0, VOCAB)
    return found


def test_names_may_have_the_prefix_of_a_whole_model(pair: Pair, tmp_path: Path) -> None:
    folder = save_heads(tmp_path, pair.tensors, "medusa_head.", "model.safetensors", medusa_num_layers=LAYERS)
    found = read(folder, pair)
    assert (found.heads, found.layers) == (HEADS, LAYERS)
    assert np.array_equal(found.lm_head_rows(3, 5, 9), pair.tensors[f"3.{LAYERS}.weight"][5:9].numpy())


def test_a_configuration_may_name_fewer_heads_than_there_are(pair: Pair, tmp_path: Path) -> None:
    assert changed(pair, tmp_path, medusa_num_heads=2).heads == HEADS


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "config", "kind", "told"),
    [
        (drop("1.0.linear.bias"), {}, CheckpointError, "lacks tensor '1.0.linear.bias'"),
        (drop(f"2.{LAYERS}.weight"), {}, CheckpointError, "lacks tensor '2.2.weight'"),
        (put("0.0.linear.weight", torch.zeros(8, HIDDEN)), {}, CheckpointError, "is it a head for this target"),
        (
            put(f"0.{LAYERS}.weight", torch.zeros(VOCAB + 1, HIDDEN)),
            {},
            CheckpointError,
            "is it a head for this target",
        ),
        (put("0.0.linear.bias", torch.zeros(HIDDEN, dtype=torch.int32)), {}, UnsupportedError, "stored as I32"),
        (put("9.0.linear.bias", torch.zeros(HIDDEN)), {}, CheckpointError, r"holds the Medusa heads \[0, 1, 2, 3, 9\]"),
        (lambda tensors: tensors.clear(), {}, CheckpointError, r"holds the Medusa heads \[\]"),
        (lambda tensors: None, {"medusa_num_heads": HEADS + 1}, CheckpointError, "expected 5 to 16"),
        (lambda tensors: None, {"medusa_num_heads": "four"}, CheckpointError, "'four', expected a whole number"),
        (lambda tensors: None, {"medusa_num_layers": 1000}, UnsupportedError, "medusa_num_layers is 1000"),
        (lambda tensors: None, {"medusa_num_layers": 3}, CheckpointError, "lacks tensor '0.2.linear.weight'"),
    ],
)
def test_a_checkpoint_that_does_not_hold_what_it_says_is_refused(
    pair: Pair, tmp_path: Path, change: Any, config: dict[str, Any], kind: type[EdgeSpecError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        changed(pair, tmp_path, change, **config)


def test_a_pickle_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a pickle, which could run anything.*medusa_lm_head.safetensors"):
        open_head_folder(tmp_path)


def test_heads_whose_targets_checkpoint_has_changed_are_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "target", random_model(seed=5))
    heads = save_heads(tmp_path / "heads", random_heads(1, 1, HIDDEN, VOCAB), medusa_num_heads=1)
    export_pair(checkpoint, None, tmp_path / "bundle", recipe="w8a8", check=False)
    save_checkpoint(checkpoint, random_model(seed=6))
    with pytest.raises(CheckpointError, match="is not what this bundle was made of"):
        add_head(tmp_path / "bundle", heads)
    shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="needs the final norm of its target"):
        add_head(tmp_path / "bundle", heads)
    assert open_bundle(tmp_path / "bundle").manifest.head is None


@pytest.mark.parametrize("name", ["0.1.linear.weight", f"3.{LAYERS}.weight", "2.0.linear.bias"])
def test_weights_that_are_not_finite_are_refused(pair: Pair, tmp_path: Path, name: str) -> None:
    spoiled = pair.tensors[name].clone().contiguous()
    spoiled.view(-1)[-1] = float("nan")
    folder = save_heads(
        tmp_path / "heads", {**pair.tensors, name: spoiled}, medusa_num_heads=HEADS, medusa_num_layers=LAYERS
    )
    with pytest.raises(CheckpointError, match="infinite or not a number"):
        with_heads(pair.checkpoint, folder, tmp_path / "bundle")


# Graphs that are not what the exporter writes


def rewritten(pair: Pair, folder: Path, change: Callable[[Any], None]) -> Bundle:
    """The bundle with its head's graph changed, and a manifest that owns it."""
    manifest = pair.bundle.manifest
    with new_bundle(folder) as (staging, seal):
        for name in manifest.files:
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes((pair.bundle.path / name).read_bytes())
        graph = onnx.load(staging / "target/head.onnx", load_external_data=False)
        change(graph.graph)
        onnx.save(graph, staging / "target/head.onnx")
        seal(replace(manifest, files={}))
    return open_bundle(folder)


def other_norm(graph: Any) -> None:
    graph.node[0].op_type = "LayerNormalization"


def fewer_heads(graph: Any) -> None:
    concat = next(node for node in graph.node if node.op_type == "Concat")
    del concat.input[-1]


def wider_than_its_input(graph: Any) -> None:
    graph.input[0].type.tensor_type.shape.dim[2].dim_value = HIDDEN * 2


def longer_weights(graph: Any) -> None:
    next(tensor for tensor in graph.initializer if tensor.name.endswith("lm_head.weight")).dims[1] = VOCAB * 2


def elsewhere(graph: Any) -> None:
    tensor = next(tensor for tensor in graph.initializer if tensor.external_data)
    next(entry for entry in tensor.external_data if entry.key == "location").value = "../tokenizer.json"


@pytest.mark.parametrize("change", [other_norm, fewer_heads, wider_than_its_input, longer_weights, elsewhere])
def test_a_graph_that_the_exporter_does_not_write_is_refused(
    pair: Pair, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    bundle = rewritten(pair, tmp_path / "bundle", change)
    with pytest.raises(BundleError, match=r"head.onnx"):
        MedusaHeads(bundle, bundle.manifest.head, CPU, threads=1)


def test_heads_are_said_to_read_the_last_hidden_state_alone(pair: Pair) -> None:
    manifest = pair.bundle.manifest
    layers = manifest.target.architecture.layers
    graphs = tuple(replace(graph, taps=(1, layers)) for graph in manifest.target.graphs)
    for taps in ((1,), (1, layers)):
        target, head = replace(manifest.target, graphs=graphs), replace(manifest.head, taps=taps)
        with pytest.raises(ValueError, match=f"reads what is behind layer {layers}, and this one"):
            check_manifest(replace(manifest, target=target, head=head))


def test_an_untouched_graph_survives_being_rewritten(pair: Pair, tmp_path: Path) -> None:
    bundle = rewritten(pair, tmp_path / "bundle", lambda graph: None)
    assert MedusaHeads(bundle, bundle.manifest.head, CPU, threads=1).count == HEADS


def test_heads_that_break_down_end_the_proposal(pair: Pair) -> None:
    class Broken(CountingHeads):
        def logits(self, state: np.ndarray) -> np.ndarray:
            logits = super().logits(state)
            logits[2] = np.nan
            return logits

    target: Any = Remembered([0, 1, 2])
    drafter = MedusaDrafter(Broken(), target)  # type: ignore[arg-type]
    context = context_of([0, 1, 2, 3], SamplingParams(temperature=0.0))
    assert drafter.propose(context, Budget(4)).tokens == (4, 5)


def test_heads_that_fail_are_given_up_and_come_back() -> None:
    class Failing(CountingHeads):
        def logits(self, state: np.ndarray) -> np.ndarray:
            raise ProviderError("no memory")

    target: Any = Remembered([0, 1, 2])
    load: Any = CountingHeads
    drafter = MedusaDrafter(Failing(), target, load=load)  # type: ignore[arg-type]
    context = context_of([0, 1, 2, 3], SamplingParams(temperature=0.0))
    assert len(drafter.propose(context, Budget(4))) == 0
    assert not drafter.ready
    assert len(drafter.propose(context, Budget(4))) == 0
    drafter.reload()
    assert drafter.ready and drafter.propose(context, Budget(4)).tokens == (4, 5, 6, 7)
