"""Graphs that select: what they give, what the runtime makes of it, and that nothing else passes for one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edge_spec.bundle import open_bundle
from edge_spec.errors import BundleError
from edge_spec.export import export_pair
from edge_spec.export.graph_run import run_graph
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.exactness import measure_exactness
from edge_spec.runtime.logit_rows import SelectedRows
from edge_spec.runtime.loop import decode, prefill
from edge_spec.runtime.model import Model
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import FixedDraft
from edge_spec.runtime.verification import RULES
from hostile_files import seal
from stub_model import context_of
from tiny_models import TOKENS, random_model, save_checkpoint

Bundles = Callable[..., Path]
Change = Callable[[onnx.ModelProto], object]

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, TOKENS - 3, 30)]


def loaded(path: Path, role: str = "target", **options: Any) -> Model:
    """A model of a bundle for CUDA on the CPU, which takes the graph for chains as it is."""
    bundle = open_bundle(path)
    record = getattr(bundle.manifest, role)
    return Model(bundle, record, ["CPUExecutionProvider"], 120, exact_rows=False, **options)


@pytest.fixture
def pair(tiny_bundle: Bundles) -> Path:
    return tiny_bundle(device="cuda", recipe="fp16", draft="close", eos=None)


def outputs_of(path: Path, graph: str, ids: Sequence[int], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Everything but the cache that a graph gives for a text, by ONNX Runtime alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path / graph), providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else len(ids) for size in value.shape]
        dtype = {"tensor(float16)": np.float16, "tensor(int32)": np.int32}.get(value.type, np.int64)
        feeds[value.name] = np.zeros(shape, dtype)
    feeds["input_ids"][0], feeds["position_ids"][0] = ids, range(len(ids))
    feeds["seqlens_k"][0], feeds["total_sequence_length"] = len(ids) - 1, np.array(len(ids), np.int32)
    feeds["logit_rows"] = np.array(rows, np.int64)
    names = ["logits", "top_logits", "top_ids", "log_sum_exp"]
    return dict(zip(names, (array[0] for array in session.run(names, feeds)), strict=True))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_graph_for_cuda_selects_the_likeliest_ids_and_never_padding(role: str, pair: Path) -> None:
    manifest = open_bundle(pair).manifest
    for graph in getattr(manifest, role).graphs:
        if graph.steps > 1:  # what it drafts is all it tells
            assert not graph.selects
            continue
        assert graph.selects
        told = outputs_of(pair, graph.path, PROMPT, range(len(PROMPT)))
        usable = told["logits"][:, : manifest.vocab_size]
        best = np.sort(usable, axis=1)[:, ::-1][:, :64]
        np.testing.assert_array_equal(told["top_logits"], best)
        np.testing.assert_array_equal(np.take_along_axis(usable, told["top_ids"], axis=1), best)
        assert all(len(set(ids)) == 64 for ids in told["top_ids"].tolist())
        expected = np.log(np.exp(usable.astype(np.float64)).sum(axis=1))
        np.testing.assert_allclose(told["log_sum_exp"], expected, rtol=1e-6, atol=1e-5)
        padding = told["logits"][:, manifest.vocab_size :]
        assert (padding.max(axis=1) > best[:, -1]).any()  # or this would show nothing about it


def test_a_vocabulary_without_padding_and_one_below_64_ids_are_selected_from(tmp_path: Path) -> None:
    from tiny_models import letter_tokenizer

    source = save_checkpoint(tmp_path / "letters", random_model(vocab_size=32), letter_tokenizer("abcdefgh"), None)
    bundle = export_pair(source, None, tmp_path / "bundle", recipe="fp16", device="cuda", check=False).path
    manifest = open_bundle(bundle).manifest
    most = manifest.vocab_size
    assert most < 64
    told = outputs_of(bundle, "target/model.onnx", [1, 2, 3], [2])
    assert sorted(told["top_ids"][0].tolist()) == list(range(most))
    rows = loaded(bundle).forward([1, 2, 3], [2])
    np.testing.assert_array_equal(rows[0], told["logits"][0, :most])
    assert isinstance(rows, SelectedRows) and rows.fetched == 0  # all of it is among the likeliest


def test_a_graph_for_the_cpu_selects_nothing(tiny_bundle: Bundles) -> None:
    assert not any(graph.selects for graph in open_bundle(tiny_bundle(recipe="fp32")).manifest.target.graphs)


def test_a_call_returns_the_likeliest_tokens_and_whole_rows_on_demand(pair: Path) -> None:
    model = loaded(pair)
    rows = model.forward(PROMPT, [5, 29])
    assert isinstance(rows, SelectedRows) and rows.shape == (2, TOKENS) and len(rows) == 2
    whole = run_graph(pair / "target/model.onnx", np.array(PROMPT), [5, 29])
    assert whole is not None
    assert rows.likeliest(1) == whole[1, :TOKENS].argmax()
    assert rows.fetched == 0
    np.testing.assert_array_equal(rows[1], whole[1, :TOKENS])
    assert rows.fetched == 1
    np.testing.assert_array_equal(np.asarray(rows), whole[:, :TOKENS])
    assert model.cache.length == len(PROMPT)
    model.cache.rollback(0)
    assert len(model.forward(PROMPT, [])) == 0
    again = model.forward([1], [0])
    assert isinstance(again, SelectedRows) and again.likeliest(0) == np.asarray(again)[0].argmax()


def test_calls_of_one_width_return_the_same_rows(pair: Path) -> None:
    whole = np.array(loaded(pair, fixed_rows=8).forward(PROMPT, range(30)))
    narrow = loaded(pair, fixed_rows=8)
    last = narrow.forward(PROMPT, [29])
    assert isinstance(last, SelectedRows)
    np.testing.assert_array_equal(last[0], whole[29])
    assert measure_exactness(loaded(pair, fixed_rows=8), TOKENS) == "bitwise"


class Whole(Model):
    """Ignores what the graph selects."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return np.array(super().forward(*arguments, **options))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.5, "min_p": 0.3, "presence_penalty": -0.5, "banned_token_ids": (3, 4)},
    ],
    ids=str,
)
def test_the_text_is_the_one_that_whole_rows_give(rule: str, params: dict[str, Any], pair: Path) -> None:
    texts = []
    bundle = open_bundle(pair)
    for kind in (Model, Whole):
        target = kind(bundle, bundle.manifest.target, ["CPUExecutionProvider"], 120, exact_rows=True)
        draft = Model(bundle, bundle.manifest.draft, ["CPUExecutionProvider"], 120, exact_rows=False)
        context = context_of(PROMPT, SamplingParams(seed=11, **params), rule)
        for _ in prefill(target, context):
            pass
        speculation = FixedDraft(ModelDrafter(draft), 4, branches=False)
        rounds = list(decode(target, speculation, context, RULES[rule], 100))
        texts.append(context.tokens)
        assert sum(r.drafted for r in rounds) > 40
    assert texts[0] == texts[1]


def node(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.op_type == kind)


def with_number(name: str, value: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        (tensor,) = (each for each in model.graph.initializer if each.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.array([value], np.int64), name))

    return change


def with_input(kind: str, index: int, name: str) -> Change:
    return lambda model: node(model, kind).input.__setitem__(index, name)


def with_attribute(kind: str, name: str, value: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        attributes = node(model, kind).attribute
        kept = [each for each in attributes if each.name != name]
        del attributes[:]
        attributes.extend([*kept, helper.make_attribute(name, value)])

    return change


def without_slice(model: onnx.ModelProto) -> None:
    """Select from all columns, padding and all."""
    model.graph.node.remove(node(model, "Slice"))
    for kind in ("TopK", "ReduceLogSumExp"):
        node(model, kind).input[0] = "logits"
    kept = [value for value in model.graph.value_info if value.name != "usable_logits"]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


@pytest.mark.parametrize(
    "change",
    [
        with_number("selected_tokens", 65),
        with_number("selected_tokens", 1 << 40),
        with_number("usable_columns", TOKENS + 1),
        with_number("usable_columns", TOKENS - 1),
        with_number("first_column", 1),
        with_number("last_axis", 1),
        with_attribute("TopK", "largest", 0),
        with_attribute("TopK", "sorted", 0),
        with_attribute("TopK", "axis", 1),
        with_attribute("ReduceLogSumExp", "keepdims", 1),
        with_input("ReduceLogSumExp", 0, "top_logits"),
        with_input("ReduceLogSumExp", 0, "logits"),
        with_input("TopK", 0, "logits"),
        with_input("Slice", 0, "usable_logits"),
        without_slice,
        lambda model: model.graph.output.remove(next(v for v in model.graph.output if v.name == "log_sum_exp")),
    ],
)
def test_a_graph_that_selects_in_another_way_is_refused(change: Change, pair: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "forged"
    shutil.copytree(pair, bundle)
    model = onnx.load(bundle / "target/model.onnx", load_external_data=False)
    change(model)
    (bundle / "target/model.onnx").write_bytes(model.SerializeToString())
    seal(bundle)
    opened = open_bundle(bundle)
    record = opened.manifest.target
    with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
        check_graph(opened, record, record.graphs[0])


def test_what_the_manifest_says_of_selecting_is_held_against_the_graph(pair: Path, tiny_bundle: Bundles) -> None:
    from dataclasses import replace

    for path, selects in ((pair, False), (tiny_bundle(recipe="fp32"), True)):
        opened = open_bundle(path)
        record = opened.manifest.target
        graph = record.graphs[0]
        check_graph(opened, record, graph)
        with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
            check_graph(opened, record, replace(graph, selects=selects))
