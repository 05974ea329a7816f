"""The graphs that the runtime probes CUDA with, built with onnx, which the runtime does without."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto as Type
from onnx import helper

CONTRIB = "com.microsoft"
HEAD, HEADS = 64, 2


def value(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    node: onnx.NodeProto,
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> bytes:
    graph = helper.make_graph([node], "probe", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17)]
    if node.domain:
        opsets.append(helper.make_opsetid(node.domain, 1))
    built: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return built


def row() -> bytes:
    return model(
        helper.make_node("Gather", ["logits", "index"], ["row"], axis=1),
        [value("logits", Type.FLOAT, [1, "rows", "columns"]), value("index", Type.INT64, [1])],
        [value("row", Type.FLOAT, [1, 1, "columns"])],
    )


def half_product() -> bytes:
    return model(
        helper.make_node("MatMul", ["a", "b"], ["y"]),
        [value("a", Type.FLOAT16, ["rows", 64]), value("b", Type.FLOAT16, [64, 64])],
        [value("y", Type.FLOAT16, ["rows", 64])],
    )


def weighted_sum() -> bytes:
    weight = helper.make_tensor("weight", Type.FLOAT, [4], [1.0, 1.0, 1.0, 1.0])
    return model(
        helper.make_node("Add", ["x", "weight"], ["y"]),
        [value("x", Type.FLOAT, [4])],
        [value("y", Type.FLOAT, [4])],
        [weight],
    )


def int4_product() -> bytes:
    return model(
        helper.make_node(
            "MatMulNBits", ["a", "b", "scales"], ["y"], domain=CONTRIB, K=1024, N=1024, bits=4, block_size=32
        ),
        [
            value("a", Type.FLOAT16, ["rows", 1024]),
            value("b", Type.UINT8, [1024, 32, 16]),
            value("scales", Type.FLOAT16, [1024 * 32]),
        ],
        [value("y", Type.FLOAT16, ["rows", 1024])],
    )


def attention(tree: bool) -> bytes:
    names = ["qkv", "", "", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos", "sin"]
    cache = [1, 1, "capacity", HEAD]
    inputs = [
        value("qkv", Type.FLOAT16, [1, "rows", (HEADS + 2) * HEAD]),
        value("past_key", Type.FLOAT16, cache),
        value("past_value", Type.FLOAT16, cache),
        value("seqlens_k", Type.INT32, [1]),
        value("total_sequence_length", Type.INT32, []),
        value("cos", Type.FLOAT16, [16, HEAD // 2]),
        value("sin", Type.FLOAT16, [16, HEAD // 2]),
    ]
    if tree:
        names += ["position_ids", "bias"]
        inputs += [value("position_ids", Type.INT64, [1, "rows"]), value("bias", Type.FLOAT16, [1, 1, "rows", "total"])]
    return model(
        helper.make_node(
            "GroupQueryAttention",
            names,
            ["attended", "present_key", "present_value"],
            domain=CONTRIB,
            num_heads=HEADS,
            kv_num_heads=1,
            do_rotary=1,
        ),
        inputs,
        [
            value("attended", Type.FLOAT16, [1, "rows", HEADS * HEAD]),
            value("present_key", Type.FLOAT16, cache),
            value("present_value", Type.FLOAT16, cache),
        ],
    )
