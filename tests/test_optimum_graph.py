"""Graphs as optimum-onnx traces them, written anew and run behind the KV cache: the same numbers, whatever happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import edge_spec
from edge_spec.bundle import MANIFEST, Bundle, open_bundle
from edge_spec.errors import BundleError, RequestError, UnsupportedError
from edge_spec.export.recipe import RECIPES
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.inspection import describe_bundle
from edge_spec.runtime.memory_law import memory_items
from edge_spec.runtime.model import Model
from hostile_files import seal, write_manifest
from traced_graphs import CONTEXT, LETTERS, VOCAB, PlainRun, traced_bundle, traced_decoder, write_model

KINDS = {
    "positions given": {},
    "positions counted": {"learned_positions": False},
    "an end that is not known to be row-wise": {"row_wise_end": False},
}
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainRun, Path]:
    model = traced_decoder(**request.param)
    return PlainRun(model), traced_bundle(tmp_path_factory.mktemp("traced") / "bundle", model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainRun, Path]:
    """A target with a draft, which is the same model with other noise in its logits."""
    target, draft = traced_decoder(), traced_decoder(row_wise_end=False)
    return PlainRun(target), traced_bundle(tmp_path_factory.mktemp("pair") / "bundle", target, draft)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return traced_bundle(tmp_path / "bundle", traced_decoder())


def model_of(path: Path, **options: Any) -> Model:
    opened = open_bundle(path)
    arguments = {"context": CONTEXT - 1, "exact_rows": True, "threads": 1, **options}
    return Model(opened, opened.manifest.target, ["CPUExecutionProvider"], **arguments)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.ptp(expected) > 2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


# The numbers


def test_a_whole_text_in_one_call(traced: tuple[PlainRun, Path]) -> None:
    plain, path = traced
    text = tokens_of(60)
    close(model_of(path).forward(text, range(60)), plain.logits(text))


def test_only_the_wanted_rows_come_back_in_the_order_they_were_asked_for(traced: tuple[PlainRun, Path]) -> None:
    plain, path = traced
    text = tokens_of(40)
    close(model_of(path).forward(text, [39, 0, 7]), plain.logits(text)[[39, 0, 7]])


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_calls_of_any_width_with_rollbacks_between_them_give_the_texts_own_logits(
    traced: tuple[PlainRun, Path], data: st.DataObject
) -> None:
    plain, path = traced
    fixed = data.draw(st.sampled_from([None, 8]), "fixed_rows")
    model = model_of(path, fixed_rows=fixed, exact_rows=data.draw(st.booleans(), "exact_rows"), context=120)
    text: list[int] = []
    for step in range(data.draw(st.integers(2, 6), "calls")):
        kept = data.draw(st.integers(0, len(text)), "kept")
        model.cache.rollback(kept)
        new = tokens_of(data.draw(st.integers(1, min(30, 120 - kept)), "rows"), seed=step)
        text = [*text[:kept], *new]
        close(model.forward(new, range(len(new))), plain.logits(text)[kept:])


def test_what_lies_behind_the_past_is_never_read(traced: tuple[PlainRun, Path]) -> None:
    plain, path = traced
    model, text = model_of(path), tokens_of(30)
    model.prefill(text[:20])
    for name in ("0.key", "0.value", "1.key", "1.value"):
        model.cache.write(name, 20, np.full((4, 100, 8), np.nan, np.float32))
    close(model.forward(text[20:], range(10)), plain.logits(text)[20:])


def test_a_cache_that_grows_shrinks_and_moves_between_texts_keeps_its_tokens(traced: tuple[PlainRun, Path]) -> None:
    plain, path = traced
    model = model_of(path)
    first, second = tokens_of(90, 1), tokens_of(50, 2)
    one, other = model.cache, model.new_cache()
    model.prefill(first[:80])
    model.use(other)
    model.prefill(second[:40])
    model.use(one)
    model.shrink(one, 70)
    assert one.length == 70
    close(model.forward(first[70:], range(20)), plain.logits(first)[70:])
    model.use(other)
    close(model.forward(second[40:], range(10)), plain.logits(second)[40:])


def test_the_last_token_of_the_context_is_answered(traced: tuple[PlainRun, Path]) -> None:
    plain, path = traced
    with edge_spec.load(path, context=CONTEXT, threads=1) as engine:
        assert engine.context == CONTEXT - 1  # a padding row needs a position too
    model, text = model_of(path), tokens_of(CONTEXT - 1)
    model.prefill(text[:-1])
    close(model.forward(text[-1:], [0]), plain.logits(text)[-1:])


def test_trees_are_refused_as_by_any_graph_for_chains(traced: tuple[PlainRun, Path]) -> None:
    model = model_of(traced[1])
    model.prefill([1, 2])
    with pytest.raises(RequestError, match="chains only"):
        model.forward([3, 4], [0], positions=[2, 2])
    with pytest.raises(RequestError, match="chains only"):
        model.forward([3, 4], [0], mask=np.eye(2, dtype=bool))
    assert not model.takes_trees and not model.slides
    assert model.cache.length == 2


def test_int4_matrices_stay_close_and_leave_the_embedding_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "int4", traced_decoder(), replace(RECIPES["int4"], embedding="fp32"))
    graph = onnx.load(tmp_path / "int4" / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") == 5 and "Gemm" not in kinds
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert shapes["lm_head.weight"] == [VOCAB, 1, 16]
    assert [VOCAB, 32] in shapes.values()


# The engine


@pytest.fixture(scope="module")
def engine(pair: tuple[PlainRun, Path]) -> Iterator[edge_spec.Engine]:
    with edge_spec.load(pair[1], threads=1) as loaded:
        yield loaded


def test_kernels_that_do_not_depend_on_the_width_are_found_to_be_exact(engine: edge_spec.Engine) -> None:
    assert engine.exactness == "bitwise"


@pytest.mark.parametrize("speculation", ["off", "auto", "lookup", "suffix", "recycling", "model"])
def test_speculation_gives_the_text_of_plain_decoding(
    pair: tuple[PlainRun, Path], engine: edge_spec.Engine, speculation: str
) -> None:
    ids = [LETTERS.index(letter) for letter in PROMPT]
    found = engine.generate(PROMPT, max_new_tokens=60, speculation=speculation, max_draft=4)
    assert list(found.token_ids) == pair[0].greedy(ids, 60)
    if speculation == "model":
        assert found.statistics.accepted > 0


@pytest.mark.parametrize("speculation", ["auto", "model"])
def test_a_seed_gives_the_same_text_with_speculation_on_and_off(engine: edge_spec.Engine, speculation: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 50, "temperature": 1.1, "seed": 5}
    plain = engine.generate(PROMPT, speculation="off", **options)
    assert engine.generate(PROMPT, speculation=speculation, **options).token_ids == plain.token_ids


def test_a_session_goes_on_where_it_was(pair: tuple[PlainRun, Path], engine: edge_spec.Engine) -> None:
    session = engine.session()
    first = session.generate(PROMPT, max_new_tokens=10)
    text = PROMPT + first.text + " and"
    ids = [LETTERS.index(letter) for letter in text]
    second = session.generate(text, max_new_tokens=10)
    assert second.statistics.reused_tokens > len(PROMPT)
    assert list(second.token_ids) == pair[0].greedy(ids, 10)


def test_the_plan_counts_weights_cache_and_what_attention_makes_of_the_past(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    with edge_spec.load(bundle, context=CONTEXT, threads=1) as engine:
        configuration = engine.plan.configuration
    items = {item.name: item.bytes for item in memory_items(manifest, configuration)}
    assert items["target KV cache"] == 4 * 8 * 4 * (CONTEXT + 1) * 5
    stored = manifest.files["target/model.onnx.data"].bytes
    assert stored - 4 * VOCAB * 32 <= items["target weights"] <= stored
    shorter = {i.name: i.bytes for i in memory_items(manifest, replace(configuration, context=CONTEXT // 2))}
    # Keys and values cut out and joined, spread over the heads, and three times the scores of 64 rows.
    assert items["workspace"] - shorter["workspace"] >= 4 * (CONTEXT // 2) * 4 * (8 * 6 + 3 * 64)


# The manifest


def test_a_manifest_from_before_such_graphs_still_reads(bundle: Path) -> None:
    body = json.loads((bundle / MANIFEST).read_text())
    assert body["target"]["graphs"][0].pop("via") == "optimum"
    write_manifest(bundle, body)
    assert open_bundle(bundle).manifest.target.graphs[0].via == "native"


def test_inspection_says_who_wrote_the_graph(bundle: Path) -> None:
    text = describe_bundle(bundle, open_bundle(bundle).manifest)
    assert "target/model.onnx, verifies chains, KV cache in float32, by way of optimum" in text
    assert "RoPE" not in text


# Graphs that are traced otherwise


def edited(change: Callable[[onnx.GraphProto], object]) -> onnx.ModelProto:
    model = traced_decoder()
    change(model.graph)
    return model


def node(graph: onnx.GraphProto, kind: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == kind)


def joined_in_front(graph: onnx.GraphProto) -> None:
    past, rows = node(graph, "Concat").input
    node(graph, "Concat").input[:] = [rows, past]


def joined_along_the_heads(graph: onnx.GraphProto) -> None:
    node(graph, "Concat").attribute[0].i = 1


def used_elsewhere(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Relu", ["past_key_values.0.key"], ["elsewhere"]))


def another_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("token_type_ids", onnx.TensorProto.INT64, [1, 1]))


def another_domain(graph: onnx.GraphProto) -> None:
    node(graph, "LayerNormalization").domain = "com.stranger"


def other_numbers(graph: onnx.GraphProto) -> None:
    graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(graph.initializer[0]).astype(np.float64), graph.initializer[0].name
        )
    )


def factor_of_a_gemm(graph: onnx.GraphProto) -> None:
    node(graph, "Gemm").attribute.append(helper.make_attribute("alpha", 2.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (joined_in_front, "put the new rows behind past_key_values.0.key"),
        (joined_along_the_heads, "put the new rows behind past_key_values.0.key"),
        (used_elsewhere, "does not join past_key_values.0.key"),
        (another_input, "its inputs are .*token_type_ids"),
        (another_domain, "uses the operator com.stranger::LayerNormalization"),
        (other_numbers, "holds numbers of type DOUBLE"),
        (factor_of_a_gemm, "Gemm that is no product"),
    ],
)
def test_a_graph_that_is_traced_otherwise_is_refused_with_the_reason(
    tmp_path: Path, change: Callable[[onnx.GraphProto], object], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        write_model(tmp_path / "model", edited(change))


# Graphs that somebody changed afterwards


def check(path: Path) -> None:
    opened: Bundle = open_bundle(path)
    check_graph(opened, opened.manifest.target, opened.manifest.target.graphs[0])


def first_weight(graph: onnx.GraphProto) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL)


def external(graph: onnx.GraphProto, key: str, value: str) -> None:
    entry = next(entry for entry in first_weight(graph).external_data if entry.key == key)
    entry.value = value


def add_node(graph: onnx.GraphProto, *arguments: Any, **attributes: Any) -> None:
    graph.node.append(helper.make_node(*arguments, **attributes))


def control_flow(graph: onnx.GraphProto) -> None:
    body = helper.make_graph([], "body", [], [])
    add_node(graph, "If", ["input_ids"], ["x"], then_branch=body, else_branch=body)


def blocks(graph: onnx.GraphProto, **changes: Any) -> None:
    sizes = {"K": 32, "N": VOCAB, "bits": 4, "block_size": 32, **changes}
    for name, dtype, shape in (("w", np.uint8, (VOCAB, 1, 16)), ("s", np.float32, (VOCAB, 1))):
        graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, dtype), name))
    logits = next(node for node in graph.node if "logits" in node.output)
    add_node(graph, "MatMulNBits", [logits.input[0], "w", "s"], ["x"], domain="com.microsoft", **sizes)


HOSTILE: dict[str, tuple[Callable[[onnx.GraphProto], object], str]] = {
    "weights outside of the bundle": (lambda g: external(g, "location", "../../etc/passwd"), "no weight file"),
    "weights in another file": (lambda g: external(g, "location", "stranger.data"), "no weight file"),
    "weights behind the end": (lambda g: external(g, "offset", str(1 << 40)), "end behind"),
    "fewer weights than their shape": (lambda g: external(g, "length", "4"), "its shape needs"),
    "control flow": (control_flow, "an attribute has the field 6"),
    "a tensor in an attribute": (
        lambda g: add_node(g, "Constant", [], ["x"], value=onnx.numpy_helper.from_array(np.zeros(3))),
        "an attribute has the field 5",
    ),
    "an operator of somebody else": (
        lambda g: add_node(g, "Relu", ["input_ids"], ["x"], domain="com.stranger"),
        "not among those allowed",
    ),
    "another contributed operator": (
        lambda g: add_node(g, "GatherBlockQuantized", ["input_ids"], ["x"], domain="com.microsoft"),
        "not among those allowed",
    ),
    "a random operator": (lambda g: add_node(g, "RandomNormalLike", ["input_ids"], ["x"]), "not among those allowed"),
    "an unknown attribute": (lambda g: add_node(g, "Relu", ["input_ids"], ["x"], axis=1), "not among those allowed"),
    "an attribute of another type": (
        lambda g: add_node(g, "Concat", ["input_ids"], ["x"], axis="1"),
        "not among those allowed",
    ),
    "texts": (lambda g: add_node(g, "Cast", ["input_ids"], ["x"], to=8), "something else than numbers"),
    "too many inputs": (lambda g: add_node(g, "Relu", ["input_ids", "input_ids"], ["x"]), "has 2 inputs"),
    "a value from nowhere": (lambda g: add_node(g, "Relu", ["nothing"], ["x"]), "nothing before it gives"),
    "a value that comes later": (lambda g: g.node.insert(0, g.node.pop()), "nothing before it gives"),
    "a value twice": (lambda g: add_node(g, "Relu", ["input_ids"], ["logits"]), "two values are called"),
    "an output that nobody gives": (lambda g: g.node.remove(g.node[-1]), "no node gives|nothing before it"),
    "a narrower cache": (
        lambda g: g.input[-1].type.tensor_type.shape.dim[3].ClearField("dim_value"),
        "inputs are not those",
    ),
    "fewer logits": (lambda g: setattr(g.output[0].type.tensor_type.shape.dim[2], "dim_value", 3), "outputs are not"),
    "a false declaration": (
        lambda g: g.value_info.append(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3])),
        "declared values",
    ),
    "blocks of fewer weights": (lambda g: blocks(g, K=320), "as a weight, expected"),
    "blocks of fewer columns": (lambda g: blocks(g, N=VOCAB + 1), "as a weight, expected"),
    "blocks of no size": (lambda g: blocks(g, K=-32), "has no size"),
    "blocks of other bits": (lambda g: blocks(g, bits=8), "no kernel takes"),
    "blocks of a size that no kernel takes": (lambda g: blocks(g, block_size=7), "no kernel takes"),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_changed_graph_is_refused_before_onnx_runtime_sees_it(
    bundle: Path, change: Callable[[onnx.GraphProto], object], reason: str
) -> None:
    file = bundle / "target" / "model.onnx"
    check(bundle)
    model = onnx.load(file, load_external_data=False)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    change(model.graph)
    file.write_bytes(model.SerializeToString())
    seal(bundle)
    with pytest.raises(BundleError, match=reason):
        check(bundle)


def test_sound_blocks_are_accepted(bundle: Path) -> None:
    file = bundle / "target" / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    blocks(model.graph)
    file.write_bytes(model.SerializeToString())
    seal(bundle)
    check(bundle)


def test_a_graph_does_not_pass_for_one_of_the_other_kind(bundle: Path, tiny_bundle: Callable[..., Path]) -> None:
    body = json.loads((bundle / MANIFEST).read_text())
    body["target"]["graphs"][0]["via"] = "native"
    write_manifest(bundle, body)
    with pytest.raises(BundleError, match="no graph this edge-spec runs"):
        check(bundle)
    native = open_bundle(tiny_bundle(recipe="fp32"))
    record = native.manifest.target
    with pytest.raises(BundleError, match="no graph this edge-spec runs"):
        check_graph(native, record, replace(record.graphs[0], via="optimum"))
