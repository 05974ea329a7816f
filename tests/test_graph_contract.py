"""The written graphs keep the contract that the runtime relies on: names, types, shapes, kernels and shared bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from edge_spec.bundle import open_bundle
from edge_spec.errors import EdgeSpecError
from edge_spec.export import export_pair
from edge_spec.export.checkpoint import open_checkpoint
from edge_spec.export.graph_run import run_graph
from edge_spec.export.quality import TEXT
from edge_spec.manifest import ModelRecord
from tiny_models import random_model, save_checkpoint

LAYERS, KV_HEADS, HEADS, HEAD_SIZE, VOCAB, HIDDEN, MLP = 2, 2, 4, 16, 288, 64, 80
FLAVOURS = [("cpu", "fp32"), ("cpu", "fp16"), ("cpu", "w8a8"), ("cpu", "int4"), ("cuda", "fp16"), ("cuda", "int4")]
CONTRIB = "com.microsoft"

Bundles = Callable[..., Path]


def graphs_of(path: Path) -> dict[str, onnx.ModelProto]:
    """Graphs of the target by file name, without their weights."""
    record = open_bundle(path).manifest.target
    return {Path(graph.path).name: onnx.load(path / graph.path, load_external_data=False) for graph in record.graphs}


def described(values: Any) -> dict[str, tuple[int, tuple[int | str, ...]]]:
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim),
        )
        for value in values
    }


def nodes_of(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def padded_bias(model: onnx.ModelProto) -> str:
    """Name of the bias as wide as cache and rows, which the graph makes once."""
    (node,) = nodes_of(model, "Pad")
    assert list(node.input[:3]) == ["tree_bias", "tree_bias_padding", ""]
    (axes,) = (tensor for tensor in model.graph.initializer if tensor.name == node.input[3])
    assert numpy_helper.to_array(axes).tolist() == [3]
    return str(node.output[0])


def regions_of(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Offset and length in the weight file of every initializer that lies there."""
    regions = {}
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            assert info.location == "model.onnx.data"
            regions[tensor.name] = (info.offset or 0, info.length)
    return regions


@pytest.fixture(params=FLAVOURS, ids="-".join)
def flavour(request: pytest.FixtureRequest, tiny_bundle: Bundles) -> tuple[str, Path]:
    device, recipe = request.param
    return device, tiny_bundle(device=device, recipe=recipe)


def test_inputs_and_outputs_are_those_of_the_contract(flavour: tuple[str, Path]) -> None:
    device, path = flavour
    float_type = TensorProto.FLOAT if device == "cpu" else TensorProto.FLOAT16
    slots = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]

    def cache(name: str, kind: int) -> dict[str, Any]:
        return {f"{name}.{slot}": (kind, (1, KV_HEADS, "capacity", HEAD_SIZE)) for slot in slots}

    inputs = {
        "input_ids": (TensorProto.INT64, (1, "rows")),
        "position_ids": (TensorProto.INT64, (1, "rows")),
        "seqlens_k": (TensorProto.INT32, (1,)),
        "total_sequence_length": (TensorProto.INT32, ()),
        "logit_rows": (TensorProto.INT64, ("logit_rows",)),
    }
    logits: dict[str, Any] = {"logits": (TensorProto.FLOAT, (1, "logit_rows", VOCAB))}
    bias = {
        "tree_bias": (float_type, (1, 1, "rows", "rows")),
        "tree_bias_padding": (TensorProto.INT64, (2,)),
    }
    expected = {
        "model.onnx": ({**inputs, **bias}, float_type),
        "model.kv8.onnx": ({**inputs, **bias}, TensorProto.INT8),
    }
    if device == "cuda":
        logits |= {
            "top_logits": (TensorProto.FLOAT, (1, "logit_rows", 64)),
            "top_ids": (TensorProto.INT64, (1, "logit_rows", 64)),
            "log_sum_exp": (TensorProto.FLOAT, (1, "logit_rows")),
        }
        expected = {"model.onnx": (inputs, float_type), "model_tree.onnx": ({**inputs, **bias}, float_type)}
    graphs = graphs_of(path)
    assert graphs.keys() == expected.keys()
    for name, (taken, cached) in expected.items():
        assert described(graphs[name].graph.input) == {**taken, **cache("past_key_values", cached)}
        assert described(graphs[name].graph.output) == {**logits, **cache("present", cached)}


def test_the_manifest_says_what_each_graph_does(flavour: tuple[str, Path]) -> None:
    device, path = flavour
    graphs = open_bundle(path).manifest.target.graphs
    said = {graph.path: (graph.tree, graph.kv) for graph in graphs}
    assert all(graph.selects == (device == "cuda") for graph in graphs)
    if device == "cuda":
        assert said == {"target/model.onnx": (False, "float16"), "target/model_tree.onnx": (True, "float16")}
    else:
        assert said == {"target/model.onnx": (True, "float32"), "target/model.kv8.onnx": (True, "int8")}
    for name, model in graphs_of(path).items():
        tree, kv = said[f"target/{name}"]
        inputs = described(model.graph.input)
        assert ("tree_bias" in inputs) == tree
        assert inputs["past_key_values.0.key"][0] == helper.np_dtype_to_tensor_dtype(np.dtype(kv))


def test_the_checker_and_strict_shape_inference_pass(flavour: tuple[str, Path]) -> None:
    _, path = flavour
    for name in graphs_of(path):
        file = path / "target" / name
        onnx.checker.check_model(str(file), full_check=True)
        inferred = onnx.shape_inference.infer_shapes(
            onnx.load(file, load_external_data=False), check_type=True, strict_mode=True, data_prop=True
        )
        assert described(inferred.graph.output) == described(onnx.load(file, load_external_data=False).graph.output)


def test_only_the_standard_and_onnx_runtimes_own_operators_are_used(flavour: tuple[str, Path]) -> None:
    for model in graphs_of(flavour[1]).values():
        assert {opset.domain: opset.version for opset in model.opset_import} == {"": 23, CONTRIB: 1}
        assert model.ir_version == 11
        assert {node.domain for node in model.graph.node} == {"", CONTRIB}
        names = [node.name for node in model.graph.node if node.name]
        assert len(names) == len(set(names))


def test_attention_reads_and_writes_the_cache_in_place(flavour: tuple[str, Path]) -> None:
    for name, model in graphs_of(flavour[1]).items():
        quantized = name == "model.kv8.onnx"
        tree = "tree_bias" in described(model.graph.input)
        attention = nodes_of(model, "GroupQueryAttention")
        assert len(attention) == LAYERS
        for layer, node in enumerate(attention):
            assert node.domain == CONTRIB
            attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
            scales = []
            if quantized:
                attributes |= {"k_quant_type": b"PER_CHANNEL", "v_quant_type": b"PER_CHANNEL", "kv_cache_bit_width": 8}
                scales = ["", *(f"layers.{layer}.{part}_scale" for part in ("key", "value"))]
            assert attributes_of(node) == attributes
            past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
            lengths = ["seqlens_k", "total_sequence_length", "rotary_cos", "rotary_sin"]
            placement = ["position_ids", padded_bias(model)] if tree else []
            assert list(node.input[1:]) == ["", "", *past, *lengths, *placement, *scales]
            assert list(node.output[1:]) == [f"present.{layer}.{part}" for part in ("key", "value")]


def test_logit_rows_are_chosen_before_the_final_norm(flavour: tuple[str, Path]) -> None:
    for model in graphs_of(flavour[1]).values():
        users = [node for node in model.graph.node if "logit_rows" in node.input]
        assert [node.op_type for node in users] == ["Gather"]
        norm = next(node for node in model.graph.node if node.name == "final_norm")
        assert norm.input[0] == users[0].output[0]


@pytest.mark.parametrize(
    ("device", "recipe", "size"), [("cpu", "int4", 32), ("cpu", "int4-128", 128), ("cuda", "int4", 32)]
)
def test_int4_blocks_have_what_the_kernel_of_the_device_takes(
    device: str, recipe: str, size: int, tiny_bundle: Bundles
) -> None:
    for model in graphs_of(tiny_bundle(device=device, recipe=recipe)).values():
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        products = nodes_of(model, "MatMulNBits")
        assert len(products) == 4 * LAYERS + 1
        for node in products:
            attributes = attributes_of(node)
            columns, rows = attributes["K"], attributes["N"]
            blocks = -(-columns // size)
            expected = {"K": columns, "N": rows, "bits": 4, "block_size": size}
            # The CPU accumulates integers; CUDA's kernel for several rows takes no zero points.
            assert attributes == ({**expected, "accuracy_level": 4} if device == "cpu" else expected)
            stored = [tensors[name] for name in node.input[1:]]
            shapes = [(rows, blocks, size // 2), (rows, blocks), (rows, -(-blocks // 2))][: len(stored)]
            assert len(stored) == (3 if device == "cpu" else 2)
            assert [tuple(tensor.dims) for tensor in stored] == shapes
            scale_type = TensorProto.FLOAT if device == "cpu" else TensorProto.FLOAT16
            kinds = [TensorProto.UINT8, scale_type, TensorProto.UINT8][: len(stored)]
            assert [tensor.data_type for tensor in stored] == kinds


def test_every_matrix_has_its_size(tiny_bundle: Bundles) -> None:
    model = graphs_of(tiny_bundle(recipe="int4"))["model.onnx"]
    sizes = {node.name: attributes_of(node) for node in nodes_of(model, "MatMulNBits")}
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    layer = {"qkv": (HIDDEN, qkv), "output": (HIDDEN, HIDDEN), "gate_up": (HIDDEN, 2 * MLP), "down": (MLP, HIDDEN)}
    expected = {f"layers.{index}.{name}": size for index in range(LAYERS) for name, size in layer.items()}
    assert {name: (a["K"], a["N"]) for name, a in sizes.items()} == {**expected, "lm_head": (HIDDEN, VOCAB)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_int4_embedding_is_the_lm_head(device: str, tied: bool, tiny_bundle: Bundles) -> None:
    for model in graphs_of(tiny_bundle(device=device, recipe="int4", tie_word_embeddings=tied)).values():
        (lookup,) = nodes_of(model, "GatherBlockQuantized")
        (head,) = (node for node in nodes_of(model, "MatMulNBits") if node.name == "lm_head")
        regions = regions_of(model)
        embedding = [regions[lookup.input[index]] for index in (0, *range(2, len(lookup.input)))]
        assert (embedding == [regions[name] for name in head.input[1:]]) == tied
        assert attributes_of(lookup) == {"bits": 4, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}


@pytest.mark.parametrize(("hidden", "shared"), [(128, True), (192, False), (384, True)])
def test_a_tied_embedding_in_blocks_of_128_is_the_lm_head_where_its_rows_are_whole_blocks(
    hidden: int, shared: bool, tiny_bundle: Bundles
) -> None:
    model = graphs_of(tiny_bundle(recipe="int4-128", hidden_size=hidden))["model.onnx"]
    (lookup,) = nodes_of(model, "GatherBlockQuantized")
    (head,) = (node for node in nodes_of(model, "MatMulNBits") if node.name == "lm_head")
    regions = regions_of(model)
    assert (regions[lookup.input[0]] == regions[head.input[1]]) == shared
    assert attributes_of(lookup)["block_size"] == attributes_of(head)["block_size"] == 128


@pytest.mark.parametrize("hidden", [64, 96, 112, 160])
@pytest.mark.parametrize(("recipe", "size"), [("w8a8", 32), ("int4", 32), ("int4-128", 128)])
def test_embedding_rows_are_as_wide_as_the_hidden_size(
    hidden: int, recipe: str, size: int, tiny_bundle: Bundles
) -> None:
    model = graphs_of(tiny_bundle(recipe=recipe, hidden_size=hidden))["model.onnx"]
    (lookup,) = nodes_of(model, "GatherBlockQuantized")
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    assert shapes[lookup.input[0]] == (VOCAB, hidden // (1 if recipe == "w8a8" else 2))
    assert shapes[lookup.input[2]] == (VOCAB, -(-hidden // size))
    assert attributes_of(lookup)["block_size"] == size


@pytest.mark.parametrize("saturate", [True, False])
def test_w8a8_weights_are_unsigned_where_signed_products_would_saturate(
    saturate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.export.model.integer_products_saturate", lambda: saturate)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model())
    report = export_pair(checkpoint, None, tmp_path / "bundle", recipe="w8a8", check=False)
    assert report.manifest.target.integer_weights == ("uint8" if saturate else "int8")
    model = graphs_of(report.path)["model.onnx"]
    onnx.checker.check_model(str(report.path / "target" / "model.onnx"), full_check=True)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    products = nodes_of(model, "MatMulIntegerToFloat")
    assert len(products) == 4 * LAYERS + 1
    for node in products:
        weight, activation_scale, scale, activation_zero, zero = (tensors[name] for name in node.input[1:])
        kind = TensorProto.UINT8 if saturate else TensorProto.INT8
        assert weight.data_type == zero.data_type == kind
        assert numpy_helper.to_array(zero) == (128 if saturate else 0)
        # Activations are rows around 128 whose own scale is multiplied in afterwards.
        assert activation_zero.data_type == TensorProto.UINT8 and numpy_helper.to_array(activation_zero) == 128
        assert numpy_helper.to_array(activation_scale) == 1
        assert tuple(scale.dims) == (weight.dims[1],)


def test_matrices_that_read_the_same_rows_share_their_quantization(tiny_bundle: Bundles) -> None:
    model = graphs_of(tiny_bundle(recipe="w8a8"))["model.onnx"]
    # One for each of qkv, output, gate_up and down, and one for lm_head.
    assert len(nodes_of(model, "QuantizeLinear")) == 4 * LAYERS + 1
    # The step is taken per row: per tensor, drafted rows would change the others' logits.
    for node in nodes_of(model, "ReduceMax"):
        assert attributes_of(node)["keepdims"] == 1
        (axes,) = (tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
        assert numpy_helper.to_array(axes).tolist() == [-1]


def test_float16_matrices_are_stored_in_half_the_space(tiny_bundle: Bundles) -> None:
    sizes = {
        recipe: (tiny_bundle(recipe=recipe) / "target" / "model.onnx.data").stat().st_size
        for recipe in ("fp32", "fp16")
    }
    for model in graphs_of(tiny_bundle(recipe="fp16")).values():
        widened = {node.input[0] for node in nodes_of(model, "Cast")}
        stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        assert len([name for name in widened if stored.get(name) == TensorProto.FLOAT16]) == 4 * LAYERS + 1
    assert sizes["fp16"] < sizes["fp32"]


def test_no_bytes_are_stored_twice(flavour: tuple[str, Path]) -> None:
    _, path = flavour
    regions: dict[str, tuple[int, int]] = {}
    for model in graphs_of(path).values():
        for name, region in regions_of(model).items():
            # A chain graph and a tree graph refer to the same bytes.
            assert regions.setdefault(name, region) == region
    distinct = sorted(set(regions.values()))
    data = (path / "target" / "model.onnx.data").read_bytes()
    for (offset, length), (next_offset, _) in itertools.pairwise(distinct):
        assert offset + length <= next_offset < offset + length + 4096
    assert sum(distinct[-1]) == len(data)
    contents = [hashlib.sha256(data[offset : offset + length]).digest() for offset, length in distinct]
    assert len(contents) == len(set(contents))


def test_little_lies_outside_the_weight_file(flavour: tuple[str, Path]) -> None:
    _, path = flavour
    for name, model in graphs_of(path).items():
        inline = {t.name: tuple(t.dims) for t in model.graph.initializer if not uses_external_data(t)}
        scales = [f"layers.{layer}.{part}_scale" for layer in range(LAYERS) for part in ("key", "value")]
        for scale in scales if name == "model.kv8.onnx" else ():
            assert inline.pop(scale) == (1, KV_HEADS, 1, HEAD_SIZE)
        # What mixes the inputs of down, and the shapes around it, lie in the graph once for all layers.
        mixers = [inline.pop(name) for name in list(inline) if name.startswith(("mixer.", "runs_"))]
        assert len(mixers) in (0, 3) and all(np.prod(dims) <= 32 * 32 for dims in mixers)
        assert all(np.prod(dims) == 1 for dims in inline.values())
        assert (path / "target" / name).stat().st_size < 40_000


def test_the_graph_with_an_int8_cache_is_the_other_one_but_for_its_cache(tiny_bundle: Bundles) -> None:
    for recipe in ("w8a8", "int4"):
        plain, quantized = graphs_of(tiny_bundle(recipe=recipe)).values()
        for before, after in zip(plain.graph.node, quantized.graph.node, strict=True):
            if before.op_type == "GroupQueryAttention":
                assert list(after.input[:11]) == list(before.input) and after.output == before.output
            else:
                assert after == before
        assert regions_of(plain) == regions_of(quantized)


@pytest.mark.parametrize("recipe", ["int4", "fp16"])
def test_cuda_graphs_agree_with_each_other_and_with_float32(recipe: str, tmp_path: Path) -> None:
    # They are meant for a GPU, but the CPU provider runs them as well, if slowly.
    source = save_checkpoint(tmp_path / "checkpoint", random_model())
    report = export_pair(source, None, tmp_path / "bundle", recipe=recipe, device="cuda")
    quality = report.manifest.target.quality
    assert quality is not None and quality.tokens == 160
    assert quality.mean_kl < (1e-3 if recipe == "fp16" else 0.5)
    checkpoint = open_checkpoint(source)
    ids = np.array(checkpoint.vocabulary.tokenizer.encode(TEXT).ids[:40])
    chain, tree = (run_graph(report.path / graph.path, ids, range(len(ids))) for graph in report.manifest.target.graphs)
    assert np.ptp(chain) > 2
    np.testing.assert_allclose(tree, chain, rtol=0, atol=0.02)


def test_a_draft_keeps_the_same_contract(tiny_bundle: Bundles) -> None:
    manifest = open_bundle(tiny_bundle(recipe="w8a8", draft="far")).manifest
    records: Iterator[ModelRecord | None] = iter((manifest.target, manifest.draft))
    folder = tiny_bundle(recipe="w8a8", draft="far")
    names = []
    for record in records:
        assert record is not None
        session = ort.InferenceSession(str(folder / record.graphs[0].path), providers=["CPUExecutionProvider"])
        names.append([value.name for value in session.get_inputs() if "past" not in value.name])
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("recipe", "device"), [("w8a8", "cuda"), ("fp32", "cuda"), ("int4-128", "cuda"), ("int3", "cpu")]
)
def test_a_recipe_that_does_not_run_on_the_device_is_refused(recipe: str, device: Any, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", random_model())
    with pytest.raises(EdgeSpecError, match=repr(recipe)):
        export_pair(checkpoint, None, tmp_path / "bundle", recipe=recipe, device=device)
    assert not (tmp_path / "bundle").exists()
