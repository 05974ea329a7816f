"""Rules of the nodes around attention: norms of heads, the bias of windows, and attention itself."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import (
    CONTRIB,
    FLOATS,
    Attributes,
    Inputs,
    Rule,
    Surroundings,
    constants,
    given,
    last_size,
    need,
    scalar,
)
from edge_spec.onnx_file import BOOL, FLOAT, INT32, INT64, Declared

# How keys and values are stored in 8 bits; together or not at all.
_CACHE_ATTRIBUTES: dict[str, Sequence[int | str]] = {
    "k_quant_type": ("PER_CHANNEL",),
    "v_quant_type": ("PER_CHANNEL",),
    "kv_cache_bit_width": (8,),
}


def split_heads(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    """Of the rule of Split: queries, keys and values apart."""
    x, facts = given(inputs[0], FLOATS), graph.facts
    sizes = [heads * facts.head_size for heads in (facts.heads, facts.kv_heads, facts.kv_heads)]
    need(last_size(x) == sum(sizes) and "num_outputs" not in attributes)
    constants(graph, inputs[1], *sizes)
    return [Declared(x.dtype, (*x.shape[:-1], size)) for size in sizes]


def _reshape(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    """Rows into heads or other pieces of equal size, or such pieces into rows."""
    x = given(inputs[0], FLOATS)
    if len(x.shape) == 3:
        size = int.from_bytes(graph.contents(inputs[1])[-8:], "little")
        need(x.shape[0] == 1 and graph.counts_rows(x.shape[1]) and size > 0 and last_size(x) % size == 0)
        pieces = last_size(x) // size
        constants(graph, inputs[1], 0, 0, pieces, size)
        return [Declared(x.dtype, (*x.shape[:2], pieces, size))]
    need(len(x.shape) == 4 and x.shape[0] == 1 and graph.counts_rows(x.shape[1]) and isinstance(x.shape[2], int))
    columns = int(x.shape[2]) * last_size(x)
    constants(graph, inputs[1], 0, 0, columns)
    return [Declared(x.dtype, (*x.shape[:2], columns))]


def _pad(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    need([graph.name(value) for value in inputs[:2]] == ["tree_bias", "tree_bias_padding"] and inputs[2] is None)
    constants(graph, inputs[3], 3)
    return [Declared(graph.float, (1, 1, "rows", "total"))]


# The chain of nodes that makes the bias of layers that see a window (edge_spec/export/window_bias.py).


def first_entry(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Declared:
    """Of the rule of Gather: how many tokens the cache holds, or the position of the call's first row."""
    scalar(graph, inputs[1], 0)
    name, axis = graph.name(inputs[0]), attributes["axis"]
    need((name, axis) in (("tree_bias_padding", 0), ("position_ids", 1)))
    return Declared(INT64, () if axis == 0 else (1,))


def _range(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    scalar(graph, inputs[0], 0)
    scalar(graph, inputs[2], 1)
    given(inputs[1], INT64, ())
    need(not graph.contents(inputs[1]))  # only what the runtime says is in the cache
    return [Declared(INT64, ("past",))]


def _squeeze(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], INT64, (1, "rows"))
    constants(graph, inputs[1], 0)
    return [Declared(INT64, ("rows",))]


def _unsqueeze(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], INT64, (1, "rows"))
    constants(graph, inputs[1], 2)
    return [Declared(INT64, (1, "rows", 1))]


def _concatenate(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], INT64, ("past",))
    given(inputs[1], INT64, ("rows",))
    return [Declared(INT64, ("total",))]


def _subtract(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = given(inputs[0], INT64)
    if first.shape == (1, "rows"):
        given(inputs[1], INT64, (1,))
        return [first]
    given(first, INT64, (1, "rows", 1))
    given(inputs[1], INT64, ("total",))
    return [Declared(INT64, (1, "rows", "total"))]


def _less(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], INT64, (1, "rows", "total"))
    given(inputs[1], INT64, ())
    return [Declared(BOOL, (1, "rows", "total"))]


def _where(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], BOOL, (1, "rows", "total"))
    bias = given(inputs[1], graph.float, (1, 1, "rows", "total"))
    given(inputs[2], graph.float, ())
    return [bias]


def _attention(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    facts, dtype = graph.facts, graph.float
    need((attributes["num_heads"], attributes["kv_num_heads"]) == (facts.heads, facts.kv_heads))
    heads = (facts.heads, facts.kv_heads, facts.kv_heads)
    shape = given(inputs[0], dtype).shape
    need(len(shape) == 3 and graph.counts_rows(shape[1]))
    if inputs[1] is None:
        given(inputs[0], dtype, (1, shape[1], sum(heads) * facts.head_size))
        need(inputs[2] is None)
    else:
        for value, count in zip(inputs[:3], heads, strict=True):
            given(value, dtype, (1, shape[1], count * facts.head_size))
    prefix, _, part = graph.name(inputs[3]).rpartition(".")
    need(part == "key" and graph.name(inputs[4]) == f"{prefix}.value" and prefix.startswith("past_key_values."))
    # Of a later step they are one behind another, which the rule of Add sees to.
    need((graph.name(inputs[5]) == "seqlens_k") if shape[1] == "rows" else (graph.kind(inputs[5]) == "Add"))
    given(inputs[5], INT32, (1,))
    need(graph.name(inputs[6]) == "total_sequence_length")
    if attributes["do_rotary"]:
        for table in inputs[7:9]:
            # Rows are looked up by position, which the kernel does not compare with the table's length.
            size = given(table, dtype).shape
            rows, columns = size if len(size) == 2 else (0, 0)
            need(isinstance(rows, int) and rows > graph.positions)
            need(columns in [rope.size // 2 for rope in facts.ropes])
        need(given(inputs[7], dtype).shape == given(inputs[8], dtype).shape)
    else:
        need(inputs[7] is None and inputs[8] is None)
    need(len(inputs) == (14 if graph.quantized_cache else 11 if graph.tree else 9))
    need(attributes.keys().isdisjoint(_CACHE_ATTRIBUTES) != graph.quantized_cache)
    if graph.quantized_cache:
        need(attributes.keys() >= _CACHE_ATTRIBUTES.keys() and inputs[11] is None)
        for scales in inputs[12:]:
            given(scales, FLOAT, (1, facts.kv_heads, 1, facts.head_size))
    if graph.tree:
        need(graph.name(inputs[9]) == "position_ids" if attributes["do_rotary"] else inputs[9] is None)
        given(inputs[10], dtype, (1, 1, "rows", "total"))
    if "local_window_size" in attributes:
        need(not graph.tree and attributes["local_window_size"] == facts.sliding_window)
    return [Declared(dtype, (1, shape[1], facts.heads * facts.head_size)), graph.cache, graph.cache]


ATTENTION_RULES: dict[tuple[str, str], Rule] = {
    ("", "Reshape"): Rule((2,), (1,), {}, _reshape),
    ("", "Pad"): Rule((4,), (1,), {}, _pad),
    ("", "Range"): Rule((3,), (1,), {}, _range),
    ("", "Squeeze"): Rule((2,), (1,), {}, _squeeze),
    ("", "Unsqueeze"): Rule((2,), (1,), {}, _unsqueeze),
    ("", "Concat"): Rule((2,), (1,), {"axis": (0,)}, _concatenate),
    ("", "Sub"): Rule((2,), (1,), {}, _subtract),
    ("", "Less"): Rule((2,), (1,), {}, _less),
    ("", "Where"): Rule((3,), (1,), {}, _where),
    (CONTRIB, "GroupQueryAttention"): Rule(
        (9, 11, 14),
        (3,),
        {
            "num_heads": int,
            "kv_num_heads": int,
            "do_rotary": (0, 1),
            "scale": float,
            "local_window_size": int,
            **_CACHE_ATTRIBUTES,
        },
        _attention,
        optional=("scale", "local_window_size", *_CACHE_ATTRIBUTES),
    ),
}
