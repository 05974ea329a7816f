"""A bundle from a stranger, signed by that stranger: it loads, or is refused before anything opens or runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import edge_spec
from edge_spec import manifest_check
from edge_spec.bundle import MANIFEST, open_bundle, read_manifest
from edge_spec.errors import BundleError, EdgeSpecError, MemoryBudgetError
from edge_spec.export.recipe import BLOCK_SIZES, FORMATS
from edge_spec.graph_checks import graph_check
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.inspection import describe_bundle
from edge_spec.onnx_file import GraphError, read_graph
from hostile_files import changed_bytes, changed_graph, seal, sources, write_manifest
from tiny_models import VARIANTS

Change = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def bundle(sound: dict[str, Path], tmp_path: Path) -> Path:
    """A bundle to be forged, with int4 layers and a draft."""
    return Path(shutil.copytree(sound["bundle int4"], tmp_path / "forged"))


def load(path: Path, **options: Any) -> None:
    with edge_spec.load(path, context=32, threads=1, exactness="distribution", **options) as engine:
        engine.generate("text", max_new_tokens=2)


def edit_graph(bundle: Path, change: Change) -> None:
    file = bundle / "target" / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())
    seal(bundle)


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((bundle / MANIFEST).read_text())
    change(body)
    write_manifest(bundle, body)


def weight(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def place(model: onnx.ModelProto, name: str = "layers.0.down.weight", **entries: str) -> None:
    for entry in weight(model, name).external_data:
        entry.value = entries.get(entry.key, entry.value)


def node(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.op_type == kind)


def attribute(model: onnx.ModelProto, kind: str, name: str) -> onnx.AttributeProto:
    return next(each for each in node(model, kind).attribute if each.name == name)


def halved(model: onnx.ModelProto, name: str) -> None:
    """Make a tensor smaller, consistently: nothing about it alone is wrong."""
    tensor = weight(model, name)
    length = next(entry for entry in tensor.external_data if entry.key == "length")
    row = int(length.value) // tensor.dims[0]
    tensor.dims[0] //= 2
    length.value = str(row * tensor.dims[0])
    for value in model.graph.value_info:
        if value.name == name:
            value.type.tensor_type.shape.dim[0].dim_value //= 2


# Weights


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../../secret",
        "../draft/model.onnx.data",
        "secret",
        "model.onnx",
        "./model.onnx.data",
        "",
        "a\0b",
    ],
)
def test_weights_outside_of_the_bundle_are_refused(bundle: Path, location: str) -> None:
    (bundle.parent / "secret").write_bytes(bytes(1 << 20))
    (bundle / "target" / "secret").write_bytes(bytes(1 << 20))
    edit_graph(bundle, lambda model: place(model, location=location, offset="0"))
    with pytest.raises(BundleError, match="which is no weight file of this bundle"):
        load(bundle)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"offset": "-1"}, "no number of bytes"),
        ({"offset": str(2**62)}, "no number of bytes"),
        ({"offset": str(10**17)}, "end behind model.onnx.data"),
        ({"length": "12"}, "has 12 bytes, its shape needs"),
        ({"offset": " 1"}, "no number of bytes"),
        ({"offset": "१"}, "no number of bytes"),
    ],
)
def test_weights_that_are_not_in_their_file_are_refused(bundle: Path, entries: dict[str, str], reason: str) -> None:
    edit_graph(bundle, lambda model: place(model, **entries))
    with pytest.raises(BundleError, match=reason):
        load(bundle)


def test_a_small_file_cannot_stand_for_large_weights_by_being_used_often(bundle: Path) -> None:
    def repeat(model: onnx.ModelProto) -> None:
        for index in range(40):
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(weight(model, "embedding.weight"))
            tensor.name = f"again.{index}"

    edit_graph(bundle, repeat)
    with pytest.raises(BundleError, match="again and again"):
        load(bundle)


# Graphs


@pytest.mark.parametrize("name", ["layers.0.down.weight", "layers.0.qkv.scale", "lm_head.zero_point", "final_norm"])
def test_a_weight_that_is_smaller_than_its_node_reads_is_refused(bundle: Path, name: str) -> None:
    edit_graph(bundle, lambda model: halved(model, name))
    with pytest.raises(BundleError, match="does not fit its inputs"):
        load(bundle)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_a_rotary_table_that_ends_before_the_context_does_is_refused(bundle: Path, name: str) -> None:
    edit_graph(bundle, lambda model: halved(model, name))
    with pytest.raises(BundleError, match="'GroupQueryAttention' .* does not fit"):
        load(bundle)


def _with_function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Abs", ["x"], ["y"])]
    function = helper.make_function("evil", "F", ["x"], ["y"], body, [helper.make_opsetid("", 23)])
    model.functions.append(function)


def _with_subgraph(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [])
    model.graph.node.insert(0, helper.make_node("If", ["one"], ["z"], then_branch=branch, else_branch=branch))


def _with_sparse(model: onnx.ModelProto) -> None:
    sparse = model.graph.sparse_initializer.add()
    sparse.dims.append(1 << 40)


def _with_tensor_attribute(model: onnx.ModelProto) -> None:
    tensor = TensorProto(data_type=1, dims=[1 << 30], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["z"], value=tensor))


def _with_node(model: onnx.ModelProto, kind: str, domain: str = "") -> None:
    model.graph.node.insert(0, helper.make_node(kind, ["input_ids"], ["z"], domain=domain))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_function, "the model has the field 25"),
        (_with_subgraph, "an attribute has the field"),
        (_with_sparse, "the graph has the field 15"),
        (_with_tensor_attribute, "an attribute has the field"),
        (lambda model: _with_node(model, "Expand"), "'Expand' .* of a kind that the exporter never writes"),
        (lambda model: _with_node(model, "Evil", "evil"), "'Evil' .* of a kind that the exporter never writes"),
        (lambda model: setattr(attribute(model, "MatMulNBits", "N"), "i", 1 << 40), "does not fit its inputs"),
        (lambda model: setattr(attribute(model, "MatMulNBits", "block_size"), "i", 0), "block_size = 0"),
        (lambda model: setattr(attribute(model, "GroupQueryAttention", "num_heads"), "i", 400), "does not fit"),
        (
            lambda model: node(model, "GroupQueryAttention").attribute.add(name="local_window_size", i=1, type=2),
            "does not fit",
        ),
        (lambda model: node(model, "Mul").input.__setitem__(1, "nothing"), "uses 'nothing'"),
        (lambda model: node(model, "Mul").output.__setitem__(0, "input_ids"), "two values are called 'input_ids'"),
        (lambda model: model.graph.input.pop(), "its inputs are not those of its architecture"),
        (lambda model: model.graph.output.pop(), "its outputs are not those of its architecture"),
        (lambda model: model.opset_import.add(domain="evil", version=1), "its operator sets are"),
        (lambda model: setattr(weight(model, "rotary_cos"), "data_type", 8), "has the type 8"),
        (lambda model: weight(model, "rotary_cos").dims.append(0), "has a dimension that no tensor has"),
        (lambda model: weight(model, "rotary_cos").dims.extend([1] * 9), "more than 4 dimensions"),
        (
            lambda model: setattr(model.graph.value_info[-1].type.tensor_type, "elem_type", 7),
            "as something else than it",
        ),
    ],
)
def test_a_graph_that_the_exporter_would_never_write_is_refused(bundle: Path, change: Change, reason: str) -> None:
    edit_graph(bundle, change)
    with pytest.raises(BundleError, match=f"is no graph this edge-spec runs: .*{reason}"):
        load(bundle)


def _with_number(name: str, value: int) -> Change:
    return lambda model: setattr(weight(model, name), "raw_data", value.to_bytes(8, "little", signed=True))


def _with_numbers(name: str, *values: int) -> Change:
    data = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    return lambda model: setattr(weight(model, name), "raw_data", data)


def _with_input(kind: str, index: int, name: str) -> Change:
    return lambda model: node(model, kind).input.__setitem__(index, name)


@pytest.mark.parametrize(
    "change",
    [
        _with_number("zero", 1 << 40),
        _with_number("one_token", 0),
        _with_input("Range", 1, "window"),
        _with_input("Range", 1, "total_sequence_length"),
        _with_input("Sub", 1, "window"),
        _with_input("Where", 1, "tree_bias"),
        _with_input("Less", 1, "tree_bias_padding"),
        lambda model: setattr(attribute(model, "Concat", "axis"), "i", 1),
        _with_numbers("column_axis", 1),
        _with_numbers("batch_axis", 1),
        _with_numbers("qkv_sizes", 64, 64, 0),
        _with_numbers("qkv_sizes", 1 << 40, 32, 32),
        _with_numbers("heads_4", 0, 0, 8, 8),
        _with_numbers("heads_4", 0, 0, 4, 1 << 40),
        _with_numbers("row_2", 0, 0, 64),
        lambda model: setattr(attribute(model, "Gelu", "approximate"), "s", b"none"),
        lambda model: setattr(attribute(model, "GroupQueryAttention", "do_rotary"), "i", 0),
    ],
)
def test_windows_and_norms_of_heads_are_those_the_exporter_writes(
    tiny_bundle: Any, tmp_path: Path, change: Change
) -> None:
    bundle = tmp_path / "forged"
    shutil.copytree(tiny_bundle(recipe="fp32", eos=None, **VARIANTS["gemma3"]), bundle)
    load(bundle)
    edit_graph(bundle, change)
    with pytest.raises(BundleError, match="is no graph this edge-spec runs"):
        load(bundle)


def test_what_a_call_holds_at_once_is_bounded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 rows: logits of 300 columns, and attention's q, k and v of 512 beside the residual stream of 256.
    largest = 64 * 4 * (512 + 256 + 256 + 300)
    monkeypatch.setattr(graph_check, "_LARGEST_WORKSPACE", 4 * largest)
    load(bundle)
    monkeypatch.setattr(graph_check, "_LARGEST_WORKSPACE", largest // 4)
    with pytest.raises(BundleError, match="hold more than .* bytes at once"):
        load(bundle)


def test_every_graph_that_the_exporter_writes_is_accepted(sound: dict[str, Path], tiny_bundle: Any) -> None:
    kinds: list[dict[str, str]] = [{"recipe": "fp16"}, {"recipe": "w8a8"}, {"device": "cuda", "recipe": "int4"}]
    kinds.append({"device": "cuda", "recipe": "fp16"})
    paths = [path for name, path in sound.items() if name.startswith("bundle")] + [
        tiny_bundle(**kind) for kind in kinds
    ]
    for path in paths:
        opened = open_bundle(path)
        for record in (opened.manifest.target, opened.manifest.draft):
            for graph in () if record is None else record.graphs:
                check_graph(opened, record, graph)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80" * 100,
        b"\xff" * 11,
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x0b",
        b"\x08",
        b"",
        b"\x3a\x00\x3a\x00",
        b"\x09" + bytes(8),
    ],
)
def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    with contextlib.suppress(GraphError):
        assert not read_graph(data).nodes


@given(random=st.randoms(use_true_random=False), fields=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_graph_holds_reading_it_ends_in_a_graph_or_its_error(
    sound: dict[str, Path], random: Random, fields: bool
) -> None:
    opened = open_bundle(sound["bundle w8a8"], verify=False)
    data = (opened.path / "target" / "model.onnx").read_bytes()
    if fields:
        model = onnx.load_from_string(data)
        try:
            changed_graph(model, random)
            data = model.SerializeToString()
        except ValueError:
            return
    else:
        data = changed_bytes(data, random)
    with contextlib.suppress(GraphError):
        read_graph(data)


# Sizes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 10**9), ("layers", 2), ("layers", 0), ("layers", -1), ("head_size", 1 << 40), ("head_size", 128),
        ("kv_heads", 4), ("heads", 10**9), ("logits_size", 10**12), ("logits_size", 301), ("context_length", 10**15),
        ("context_length", 513), ("hidden_size", 257), ("kv_heads", 3), ("head_size", 63),
    ],
)  # fmt: skip
def test_sizes_that_are_not_the_graphs_are_refused_before_memory_is_taken(bundle: Path, name: str, value: int) -> None:
    edit_manifest(bundle, lambda body: body["target"]["architecture"].update({name: value}))
    with pytest.raises(BundleError, match="is invalid|no graph this edge-spec runs"):
        load(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(vocab_size=10**9),
        lambda body: body.update(vocab_size=0),
        lambda body: body.update(context_length=10**6),
        lambda body: body.update(eos_token_ids=[-1]),
        lambda body: body.update(special_token_ids=[258]),
        lambda body: body.update(bos_token_id=1 << 40),
        lambda body: body["target"].update(source="x" * 10_000),
        lambda body: body["files"]["tokenizer.json"].update(bytes=1 << 60),
        lambda body: body["files"]["tokenizer.json"].update(bytes=-1),
        lambda body: body["files"]["tokenizer.json"].update(sha256="../../etc"),
        lambda body: body["files"].update({f"target/{n}": body["files"]["tokenizer.json"] for n in range(99)}),
        lambda body: body["target"]["graphs"][0].update(path="tokenizer.json"),
    ],
)
def test_numbers_that_no_bundle_has_are_refused(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(bundle, change)
    with pytest.raises(BundleError, match="manifest.json is invalid"):
        read_manifest(bundle)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[" * 10**6, "9" * 10**6])
def test_json_that_is_none_is_refused(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="is not valid JSON"):
        read_manifest(bundle)


def test_a_manifest_without_end_is_not_read_to_the_end(bundle: Path) -> None:
    os.truncate(bundle / MANIFEST, 1 << 40)
    with pytest.raises(BundleError, match="longer than 4,194,304 bytes"):
        read_manifest(bundle)


def test_what_cannot_fit_the_machine_is_refused(bundle: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="does not fit its memory budget"):
        edge_spec.load(bundle, memory_budget=1 << 20)


# Files


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json", "target/model.onnx", "target/model.onnx.data"])
def test_a_pipe_does_not_make_anybody_wait(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    with pytest.raises(BundleError, match="is a pipe, expected a file"):
        load(bundle)


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json", "target/model.onnx", "target/model.onnx.data", "target"])
def test_a_link_is_refused_even_to_what_ought_to_be_there(bundle: Path, name: str) -> None:
    (bundle / name).rename(bundle.parent / "elsewhere")
    (bundle / name).symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(BundleError, match="is a symbolic link, expected a (file|folder)"):
        load(bundle)


def test_the_bundle_itself_may_be_a_link(bundle: Path) -> None:
    (bundle.parent / "link").symlink_to(bundle)
    load(bundle.parent / "link")


def test_a_device_is_refused(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    try:
        os.mknod(bundle / "tokenizer.json", 0o20644, os.makedev(1, 5))  # zeros without end
    except PermissionError:
        pytest.skip("devices cannot be made here")
    with pytest.raises(BundleError, match="is a device, expected a file"):
        load(bundle)


# Tokenizers and what is printed


def edit_tokenizer(bundle: Path, **parts: Any) -> None:
    file = bundle / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    seal(bundle)


def replacement(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [replacement("a", "aa")] * 40}}, "times as long"),
        ({"normalizer": replacement("", "b" * 1000)}, "times as long"),
        ({"decoder": {"type": "Sequence", "decoders": [replacement("a", "aa")] * 40}}, "times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "in front of every text"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+b"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "repetition inside of a repetition",
        ),
        ({"post_processor": {**TEMPLATE, "single": [{"SpecialToken": {"id": "X", "type_id": 0}}]}}, "the text once"),
        (
            {
                "post_processor": {
                    **TEMPLATE,
                    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                }
            },
            "uses 'X', which it does not define",
        ),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}, "not a readable tokenizer"),
        ({"version": "x" * 10_000}, "not a readable tokenizer"),
    ],
)
def test_a_tokenizer_that_blows_up_or_panics_is_refused(bundle: Path, parts: dict[str, Any], reason: str) -> None:
    edit_tokenizer(bundle, **parts)
    with pytest.raises(BundleError, match=reason) as refused:
        load(bundle)
    assert len(str(refused.value)) < 1000


def test_a_tokenizer_whose_ids_the_models_do_not_have_is_an_error_of_the_bundle(bundle: Path) -> None:
    model = json.loads((bundle / "tokenizer.json").read_text())["model"]
    edit_tokenizer(bundle, model={**model, "vocab": {text: 4_000_000 + n for n, text in enumerate(model["vocab"])}})
    with pytest.raises(EdgeSpecError):
        load(bundle)


def test_what_a_bundle_says_of_itself_cannot_move_the_cursor(bundle: Path) -> None:
    edit_manifest(bundle, lambda body: body["target"].update(source="\x1b[2J\x1b[31m\u202emodel\n\nfiles: all fine"))
    text = describe_bundle(bundle, read_manifest(bundle))
    assert "\x1b" not in text and "\u202e" not in text and "\nfiles: all fine" not in text
    assert "\\x1b[2J" in text


# What the manifest says of recipes, and of graphs that draft


@pytest.fixture
def cuda_pair(tiny_bundle: Any, tmp_path: Path) -> Path:
    """A bundle for CUDA to be forged, whose draft is there for both devices."""
    kind = {"device": "cuda", "recipe": "fp16", "draft": "close", "draft_recipe": "fp16", "draft_device": "both"}
    return Path(shutil.copytree(tiny_bundle(**kind, eos=None), tmp_path / "forged"))


@pytest.mark.parametrize("model", ["target", "draft", "cpu_draft"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict.clear, "recipe stores embedding as None, expected one of fp32, fp16, int8, int4"),
        (lambda recipe: recipe.pop("lm_head"), "recipe stores lm_head as None"),
        (lambda recipe: recipe.update(attention=4), "recipe stores attention as 4"),
        (lambda recipe: recipe.update(mlp_up="int8"), "recipe stores mlp_up as 'int8'"),
        (lambda recipe: recipe.update(block_size=0), "int4 blocks of 0, expected one of 16, 32"),
        (lambda recipe: recipe.update(block_size="32"), "int4 blocks of '32'"),
        (lambda recipe: recipe.update(block_size=10**400), "int4 blocks of 1000"),
        (lambda recipe: recipe.update(name=1), "recipe has the name 1"),
    ],
)
def test_a_recipe_that_no_model_has_is_refused(
    model: str, change: Callable[[dict[str, Any]], object], reason: str, cuda_pair: Path
) -> None:
    edit_manifest(cuda_pair, lambda body: change(body[model]["recipe"]))
    with pytest.raises(BundleError, match=reason):
        read_manifest(cuda_pair)


def _set_steps(body: dict[str, Any], steps: Any, index: int = -1) -> None:
    body["draft"]["graphs"][index]["steps"] = steps


def _repeat_graphs(body: dict[str, Any], model: str) -> None:
    body[model]["graphs"] *= 1000


def _set_kv(body: dict[str, Any], model: str, kv: str) -> None:
    for graph in body[model]["graphs"]:
        graph["kv"] = kv


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((lambda body, steps=steps: _set_steps(body, steps), "expected 1 to 16") for steps in (0, -1, 17, 10**30)),
        *((lambda body, steps=steps: _set_steps(body, steps), "expected int") for steps in (True, 2.0, "2", None)),
        (lambda body: _set_steps(body, 2), "one of several that draft 2 tokens"),
        (lambda body: [_set_steps(body, 2, index) for index in range(-4, 0)], "a model has no graphs"),
        (lambda body: body["target"]["graphs"].append(body["draft"]["graphs"][-1]), "which graphs of its kind cannot"),
        *((lambda body, model=model: _repeat_graphs(body, model), "named twice") for model in ("target", "draft")),
        (lambda body: _set_kv(body, "target", "float32"), "in float32, expected float16 or int8"),
        (lambda body: _set_kv(body, "draft", "float32"), "in float32, expected float16 or int8"),
        (lambda body: _set_kv(body, "cpu_draft", "float16"), "in float16, expected float32 or int8"),
        (lambda body: body["cpu_draft"]["architecture"].update(context_length=1), "context_length is 1, expected 2"),
        (lambda body: body["cpu_draft"]["graphs"][0].update(path="../draft/model.onnx"), "files lacks"),
    ],
)
def test_graphs_that_nobody_writes_for_a_device_are_refused(
    change: Callable[[dict[str, Any]], object], reason: str, cuda_pair: Path
) -> None:
    read_manifest(cuda_pair)
    edit_manifest(cuda_pair, change)
    with pytest.raises(BundleError, match=reason):
        read_manifest(cuda_pair)


def test_every_recipe_that_is_exported_is_accepted() -> None:
    assert {name: tuple(formats) for name, formats in manifest_check._FORMATS.items()} == FORMATS
    assert manifest_check._BLOCK_SIZES == BLOCK_SIZES
