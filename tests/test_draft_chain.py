"""Graphs that draft several tokens in one call draft what single steps do, in place, and nothing else is one."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import edge_spec
from edge_spec.bundle import Bundle, open_bundle
from edge_spec.errors import BundleError, RequestError
from edge_spec.export import export_pair
from edge_spec.export.draft_chain_graph import CHAIN_LENGTHS
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.runtime.calibration import calibrate
from edge_spec.runtime.context import Context
from edge_spec.runtime.draft_chain import DraftedChain
from edge_spec.runtime.draft_vocabulary import read_draft_vocabulary
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.model_choice import chain_candidates
from edge_spec.runtime.drafters.protocol import Budget
from edge_spec.runtime.logits_processors import LogitsPipeline
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from hostile_files import seal
from tiny_models import TOKENS, VARIANTS, export_tiny, perturbed, random_model, save_checkpoint

LENGTHS = (2, 4)
CONTEXT = 700
CPU = ["CPUExecutionProvider"]

Bundles = Callable[..., Path]
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    """Return a function that exports a pair for the CPU whose draft has such graphs, each kind once."""
    bundles: dict[str, Path] = {}

    def find(**kind: Any) -> Path:
        key = repr(sorted(kind.items()))
        if key not in bundles:
            bundles[key] = export_tiny(
                tmp_path_factory.mktemp("chained"), draft="close", eos=None, max_position_embeddings=CONTEXT, **kind
            )
        return bundles[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHAIN_LENGTHS, "cpu", LENGTHS)
        yield find


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft proposes a part of the vocabulary."""
    folder = tmp_path_factory.mktemp("trimmed")
    target = random_model("qwen2", max_position_embeddings=CONTEXT)
    sources = [
        save_checkpoint(folder / name, model, eos=None)
        for name, model in (("target", target), ("draft", perturbed(target, 0.05)))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHAIN_LENGTHS, "cpu", LENGTHS)
        return export_pair(
            *sources, folder / "bundle", recipe="fp32", draft_recipe="fp32", check=False, draft_vocab=261
        ).path


def draft_of(path: Path, context: int = CONTEXT) -> Model:
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    return Model(bundle, bundle.manifest.draft, CPU, context, exact_rows=False, threads=1)


def single_steps(
    model: Model,
    tokens: Sequence[int],
    steps: int,
    noise: Sequence[Array] | None = None,
    inverse: float = 1.0,
    ids: Array | None = None,
) -> tuple[list[int], list[float]]:
    """What the model chooses token by token; the last one is not read."""
    drafted: list[int] = []
    shares: list[float] = []
    for step in range(steps):
        logits = model.forward(tokens, (len(tokens) - 1,))[0].astype(np.float64) * inverse
        column = int(np.argmax(logits if noise is None else logits + noise[step]))
        weights = np.exp(logits - logits.max())
        shares.append(float(weights[column] / weights.sum()))
        drafted.append(column if ids is None else int(ids[column]))
        tokens = drafted[-1:]
    return drafted, shares


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENS - 3, count)]


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("recipe", ["fp32", "w8a8", "int4"])
def test_a_call_drafts_what_single_steps_do(family: str, recipe: str, chained: Bundles) -> None:
    """Also behind texts that are longer than a window, and where the drafts of the call before are taken back."""
    path = chained(recipe=recipe, draft_recipe=recipe, **VARIANTS[family])
    model, stepwise = draft_of(path), draft_of(path)
    assert model.chain_lengths == LENGTHS
    text = random_tokens(1, 40)
    random = np.random.default_rng(2)
    for turn in range(12):
        steps = LENGTHS[turn % 2]
        noise = [random.gumbel(size=model.columns).astype(np.float32) for _ in range(steps)] if turn % 3 else None
        inverse = 1 / 0.7 if turn % 3 else 1.0
        drafted = model.draft(text, steps, noise, inverse)
        tokens, shares = single_steps(stepwise, text, steps, noise, inverse)
        assert list(drafted.tokens) == tokens
        # One row and several round differently, by which an activation may come to the next of its 8-bit steps.
        np.testing.assert_allclose(drafted.shares, shares, rtol=2e-3 if recipe == "w8a8" else 1e-4)
        assert model.cache.length == stepwise.cache.length
        for each in (model, stepwise):
            each.cache.rollback(stepwise.cache.length - turn % steps)
        text = random_tokens(turn, 1 + turn % 3)
        logits = model.forward(text, range(len(text)))
        np.testing.assert_array_equal(logits, stepwise.forward(text, range(len(text))))


@settings(max_examples=25, deadline=None)
@given(
    past=st.integers(0, 640),
    turns=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(LENGTHS), st.integers(0, 60)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_texts_of_any_length_and_any_rollback(
    past: int, turns: list[tuple[int, int, int]], seed: int, chained: Bundles
) -> None:
    """The cache grows by 256 slots; a call begins in one size and must not end beyond it."""
    path = chained(recipe="fp32", family="qwen2")
    model, stepwise = draft_of(path), draft_of(path)
    for each in (model, stepwise):
        each.prefill(random_tokens(seed, past)) if past else None
    for rows, steps, forgotten in turns:
        if model.cache.length + rows + steps - 1 > CONTEXT:
            break
        tokens = random_tokens(seed + rows, rows)
        assert list(model.draft(tokens, steps).tokens) == single_steps(stepwise, tokens, steps)[0]
        for each in (model, stepwise):
            each.cache.rollback(max(0, each.cache.length - forgotten))


def test_the_cache_is_written_in_place_and_nowhere_else(chained: Bundles) -> None:
    """Where past and present were not the same memory, the kernel would first clear or copy the whole buffer."""
    model = draft_of(chained(recipe="fp32", family="qwen2"))
    model.prefill(random_tokens(0, 20))
    buffers = [value.numpy() for value in model.cache._buffers.values()]
    for buffer in buffers:
        buffer[:, :, 20:] = 77.0
    before = [buffer[:, :, :20].copy() for buffer in buffers]
    model.draft(random_tokens(1, 3), 4)
    assert model.cache.length == 26
    for buffer, old in zip(buffers, before, strict=True):
        np.testing.assert_array_equal(buffer[:, :, :20], old)
        assert not (buffer[:, :, 20:26] == 77.0).all(axis=-1).any()
        assert (buffer[:, :, 26:] == 77.0).all()


def test_a_call_that_does_not_fit_is_refused_and_leaves_the_cache(chained: Bundles) -> None:
    model = draft_of(chained(recipe="fp32", family="qwen2"), 24)
    model.prefill(random_tokens(0, 20))
    with pytest.raises(RequestError, match="2 tokens and 4 drafted ones do not fit: the cache holds 20 of 24"):
        model.draft((1, 2), 4)
    assert model.cache.length == 20
    assert model.draft((1,), 4).tokens
    assert model.cache.length == 24


def test_texts_take_turns(chained: Bundles) -> None:
    path = chained(recipe="fp32", family="qwen2")
    model, alone = draft_of(path), draft_of(path)
    first, second = model.cache, model.new_cache()
    told: list[tuple[int, ...]] = []
    for cache in (first, second, first):
        model.use(cache)
        told.append(model.draft(random_tokens(cache is second, 9), 4).tokens)
    assert told[0] == alone.draft(random_tokens(0, 9), 4).tokens
    alone.draft(random_tokens(0, 9), 2)
    alone.cache.rollback(12)
    assert told[2] == alone.draft(random_tokens(0, 9), 4).tokens
    model.shrink(second)
    assert second.memory_bytes == 0


# The drafter


def proposals(
    drafter: ModelDrafter, sampling: SamplingParams, seed: int, most: int = 7, **options: Any
) -> list[tuple[Any, ...]]:
    """What it proposes as a text grows, now by a few of its own tokens, now by others."""
    context = Context(random_tokens(seed, 30), sampling, **options)
    random = np.random.default_rng(seed)
    made = []
    for _ in range(15):
        proposal = drafter.propose(context, Budget(most))
        made.append((proposal.tokens, proposal.evidence, proposal.q is None))
        kept = int(random.integers(0, len(proposal) + 1))
        tokens = [*proposal.tokens[:kept], *random_tokens(int(random.integers(1000)), int(random.integers(1, 4)))]
        drafter.rollback(len(context.tokens) + kept)
        context.tokens.extend(tokens)
    return made


class Stepwise(ModelDrafter):
    """The same without the graphs in question."""

    def chain_lengths(self, context: Context, branches: bool) -> tuple[int, ...]:
        return ()


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=0.8, seed=3),
    "hot": SamplingParams(temperature=1.7, seed=4),
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "trimmed"])
def test_the_drafter_proposes_what_it_would_step_by_step(
    sampling: SamplingParams, kind: str, chained: Bundles, trimmed: Path
) -> None:
    path = trimmed if kind == "trimmed" else chained(recipe="fp32", **VARIANTS[kind])
    vocabulary = read_draft_vocabulary(open_bundle(path))
    calls: list[tuple[Any, ...]] = []
    fast = ModelDrafter(draft_of(path), vocabulary=vocabulary, on_call=lambda *call: calls.append(call))
    slow = Stepwise(draft_of(path), vocabulary=vocabulary)
    for seed in range(3):
        for drafter in (fast, slow):
            drafter.rollback(0)
        assert proposals(fast, sampling, seed) == proposals(slow, sampling, seed)
    drafted = [call[3] for call in calls if len(call) == 4]
    assert set(drafted) == {2, 4}  # four, two, and the seventh alone


@pytest.mark.parametrize("window", [12, 64])
def test_a_full_window_is_left_to_single_steps(window: int, chained: Bundles) -> None:
    path = chained(recipe="fp32", family="qwen2")
    fast, slow = ModelDrafter(draft_of(path), window), Stepwise(draft_of(path), window)
    assert proposals(fast, SAMPLING["greedy"], 1) == proposals(slow, SAMPLING["greedy"], 1)


def test_what_a_graph_cannot_choose_is_drafted_step_by_step(chained: Bundles) -> None:
    drafter = ModelDrafter(draft_of(chained(recipe="fp32", family="qwen2")))
    sampling = SAMPLING["coupled"]
    plain = Context([1, 2, 3], sampling)
    assert drafter.chain_lengths(plain, False) == LENGTHS
    assert drafter.chain_lengths(plain, True) == ()  # runners-up
    assert drafter.chain_lengths(Context([1, 2, 3], sampling, coupled=False), False) == ()
    penalized = SamplingParams(temperature=0.8, seed=3, presence_penalty=1.0)
    assert drafter.chain_lengths(Context([1, 2, 3], penalized, LogitsPipeline(penalized)), False) == ()
    drafter.unload()
    assert drafter.chain_lengths(plain, False) == ()


def test_a_call_is_as_long_as_is_expected_to_pay(chained: Bundles) -> None:
    calls: list[tuple[Any, ...]] = []
    drafter = ModelDrafter(
        draft_of(chained(recipe="fp32", family="qwen2")), on_call=lambda *call: calls.append(call[:1] + call[3:])
    )
    context = Context(random_tokens(0, 10), SAMPLING["greedy"])
    wanted = {0: 5, 4: 2, 6: 1, 7: 0}

    def ahead(chain: Sequence[Any]) -> int:
        return wanted[len(chain)]

    proposal = drafter.propose(context, Budget(16, another=lambda chain: not chain or ahead(chain) > 0, ahead=ahead))
    assert len(proposal) == 7
    assert calls == [(8,), (2, 4), (1, 2), (1,)]


def test_from_where_the_model_breaks_down_nothing_is_proposed() -> None:
    context = Context([1], SAMPLING["greedy"])
    drafted = DraftedChain((5, 6, 7, 8), (0.97, 0.3, math.nan, 0.5))
    assert [token for token, _ in chain_candidates(context, drafted)] == [5, 6]


# The engine


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("speculation", ["model", "auto"])
def test_drafting_several_at_once_changes_no_token(
    family: str, speculation: str, chained: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    draft = Model.draft

    def counted(model: Model, tokens: Sequence[int], steps: int, *noise: Any) -> DraftedChain:
        calls.append(steps)
        return draft(model, tokens, steps, *noise)

    monkeypatch.setattr(Model, "draft", counted)
    with edge_spec.load(chained(recipe="fp32", **VARIANTS[family]), threads=1, context=200) as engine:
        prompt = random_tokens(5, 30)
        for temperature, options in ((0.0, {}), (0.8, {}), (0.8, {"top_k": 20, "top_p": 0.9}), (0.6, {"min_p": 0.1})):
            asked: dict[str, Any] = {"max_new_tokens": 80, "temperature": temperature, "seed": 5, **options}
            plain = engine.generate(prompt, speculation="off", **asked)
            calls.clear()
            drafted = engine.generate(prompt, speculation=speculation, max_draft=6, tree=False, **asked)
            assert drafted.token_ids == plain.token_ids
            # The controller may find that the draft, as large as the target, never pays.
            assert speculation == "auto" or (calls and drafted.statistics.accepted > 0)


def test_calibration_measures_what_a_token_of_a_call_costs(chained: Bundles) -> None:
    """By a clock that takes every call for a second: where it drafts two tokens, each is half a step."""
    bundle = open_bundle(chained(recipe="fp32", family="qwen2"))
    draft = draft_of(bundle.path, 300)
    target = Model(bundle, bundle.manifest.target, CPU, 300, exact_rows=True, threads=1)
    now = 0.0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal now
            now += 1.0
            return call(*arguments, **options)

        return counted

    for model, name in ((target, "forward"), (draft, "forward"), (draft, "draft")):
        setattr(model, name, counting(getattr(model, name)))
    measured = calibrate(target, draft, random_tokens(0, 10), clock=lambda: now)
    assert measured.costs.chain_step == 0.5
    assert draft.cache.length == 0
    measured.costs.observe_draft(1, 0, 4 * measured.costs.chain_step, 4)
    assert measured.costs.draft(0, 1) == pytest.approx(1.0)


# The graph


def graphs_of(path: Path) -> Iterator[tuple[Bundle, Any]]:
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    for graph in bundle.manifest.draft.graphs:
        if graph.steps > 1:
            yield bundle, graph


@pytest.mark.parametrize("recipe", ["fp16", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_bundles_for_cuda_have_such_graphs_and_they_run(family: str, recipe: str, tiny_bundle: Bundles) -> None:
    """On CPU, which takes the same graphs; float16 rounds a little differently there from one graph to the other."""
    path = tiny_bundle(device="cuda", recipe=recipe, draft_recipe=recipe, draft="close", eos=None, **VARIANTS[family])
    bundle = open_bundle(path)
    assert bundle.manifest.draft is not None
    assert all(graph.steps == 1 for graph in bundle.manifest.target.graphs)
    assert [graph.steps for graph in bundle.manifest.draft.graphs if graph.steps > 1] == list(CHAIN_LENGTHS["cuda"])
    for _, graph in graphs_of(path):
        assert (graph.tree, graph.kv, graph.via) == (False, "float16", "native")
        file = onnx.load(path / graph.path, load_external_data=False)
        onnx.checker.check_model(str(path / graph.path), full_check=True)
        assert {node.domain for node in file.graph.node} == {"", "com.microsoft"}
    model, stepwise = draft_of(path, 200), draft_of(path, 200)
    tokens = random_tokens(0, 30)
    agreed = 0
    for turn in range(10):
        drafted = model.draft(tokens, 4)
        told, shares = single_steps(stepwise, tokens, 4)
        agreed += list(drafted.tokens) == told
        np.testing.assert_allclose(drafted.shares[0], shares[0], atol=0.02)
        for each in (model, stepwise):
            each.cache.rollback(30 + turn)
        tokens = random_tokens(turn, 1 + turn % 2)
    assert agreed >= 8


def test_weights_lie_in_such_a_graph_once_and_in_the_same_bytes(chained: Bundles) -> None:
    path = chained(recipe="int4", draft_recipe="int4", family="qwen2")

    def places(name: str) -> dict[str, dict[str, str]]:
        graph = onnx.load(path / "draft" / name, load_external_data=False).graph
        return {t.name: {entry.key: entry.value for entry in t.external_data} for t in graph.initializer}

    single, chain = places("model.onnx"), places("draft4.onnx")
    stored = {name: place for name, place in chain.items() if place}
    assert stored == {name: place for name, place in single.items() if place}
    names = [node.name for node in onnx.load(path / "draft/draft4.onnx", load_external_data=False).graph.node]
    named = [name for name in names if name]
    assert len(named) == len(set(named))


def node(model: onnx.ModelProto, kind: str, number: int = 0) -> onnx.NodeProto:
    return [each for each in model.graph.node if each.op_type == kind][number]


def constant(model: onnx.ModelProto, name: str, values: Array) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))


def other_ids(model: onnx.ModelProto) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "column_ids")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[3] = 1 << 40
    constant(model, "column_ids", values)


def ids_twice(model: onnx.ModelProto) -> None:
    """Look the id of a column up as if it were a column."""
    first, second = (each for each in model.graph.node if each.op_type == "Gather" and each.input[0] == "column_ids")
    second.input[1] = first.output[0]


def column_as_id(model: onnx.ModelProto) -> None:
    embedding = next(
        each for each in model.graph.node if each.input[0].startswith("embedding") and "input_ids" not in each.input
    )
    embedding.input[1] = node(model, "ArgMax").output[0]


TAMPERED: dict[str, Callable[[onnx.ModelProto], object]] = {
    "a step writes elsewhere": lambda model: constant(model, "rows_before.1", np.array([9], np.int32)),
    "a step writes before": lambda model: constant(model, "rows_before.1", np.array([-1], np.int32)),
    "a later step has the first's length": lambda model: node(model, "GroupQueryAttention", -1).input.__setitem__(
        5, "seqlens_k"
    ),
    "the length is not the runtime's": lambda model: node(model, "Add").input.__setitem__(0, "total_sequence_length"),
    "noise beyond its rows": lambda model: constant(model, "step.1", np.array([2], np.int64)),
    "columns beyond the logits": lambda model: constant(model, "columns", np.array([1 << 40], np.int64)),
    "another row": lambda model: constant(model, "last_row", np.array([-7], np.int64)),
    "another axis": lambda model: setattr(node(model, "ArgMax").attribute[0], "i", 0),
    "ids beyond the vocabulary": other_ids,
    "ids of ids": ids_twice,
    "a column instead of its id": column_as_id,
    "an input more": lambda model: model.graph.input.append(
        helper.make_tensor_value_info("more", TensorProto.FLOAT, [1])
    ),
    "an output less": lambda model: model.graph.output.pop(),
    "another past": lambda model: node(model, "GroupQueryAttention").input.__setitem__(3, "past_key_values.1.key"),
    "a softmax of noise": lambda model: node(model, "Softmax").input.__setitem__(
        0, next(each for each in model.graph.node if each.input[0] == "noise").output[0]
    ),
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_other_graphs_are_refused(change: Callable[[onnx.ModelProto], object], trimmed: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(trimmed, tmp_path / "forged"))
    file = bundle / "draft" / "draft2.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())
    seal(bundle)
    opened = open_bundle(bundle)
    record = opened.manifest.draft
    assert record is not None
    with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
        check_graph(opened, record, next(graph for graph in record.graphs if graph.steps == 2))


def test_a_graph_that_drafts_another_number_of_tokens_than_said_is_refused(trimmed: Path) -> None:
    bundle = open_bundle(trimmed)
    record = bundle.manifest.draft
    assert record is not None
    graph = next(graph for graph in record.graphs if graph.steps == 2)
    for steps in (1, 3, 4):
        with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
            check_graph(bundle, record, dataclasses.replace(graph, steps=steps))
