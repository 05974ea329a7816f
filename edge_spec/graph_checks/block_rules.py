"""What graphs of heads that fill a block at once are given, and rules of their nodes (export/heads/block_graph.py).

Rows are of five kinds: those of the features, as many as hidden states are read ("tap_rows"); those of the block, whose
number is fixed; both together ("key_rows"); those of attention ("rows"); and those whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.graph_checks.graph_rule import (
    CONTRIB,
    FLOATS,
    Attributes,
    Inputs,
    MismatchError,
    Rule,
    Surroundings,
    constants,
    given,
    last_size,
    need,
)
from edge_spec.graph_checks.graph_rules import RULES
from edge_spec.manifest import ArchitectureRecord
from edge_spec.onnx_file import FLOAT, INT32, INT64, Declared

# Everything else that decoders have is about tokens that follow the cache.
_KINDS = (
    ("", "Abs"),
    ("", "Add"),
    ("", "Cast"),
    ("", "Div"),
    ("", "MatMul"),
    ("", "Mul"),
    ("", "Pad"),
    ("", "ReduceMax"),
    ("", "Reshape"),
    ("", "RMSNormalization"),
    ("", "Sigmoid"),
    ("", "Split"),
    (CONTRIB, "GatherBlockQuantized"),
    (CONTRIB, "GroupQueryAttention"),
    (CONTRIB, "MatMulIntegerToFloat"),
    (CONTRIB, "MatMulNBits"),
    (CONTRIB, "QuantizeLinear"),
    (CONTRIB, "SkipSimplifiedLayerNormalization"),
)

_EVERYTHING = 2**63 - 1


def block_inputs(facts: ArchitectureRecord, taps: int, dtype: int) -> dict[str, Declared]:
    """What such a graph is given but for its caches; ``dtype`` is that of activations."""
    return {
        "input_ids": Declared(INT64, (1, 1)),
        "taps": Declared(dtype, (1, "tap_rows", taps * facts.hidden_size)),
        "position_ids": Declared(INT64, (1, "key_rows")),
        "query_rows": Declared(INT64, ("rows",)),
        "key_rows": Declared(INT64, ("rows",)),
        "seqlens_k": Declared(INT32, (1,)),
        "total_sequence_length": Declared(INT32, ()),
        "tree_bias": Declared(dtype, (1, 1, "rows", "rows")),
        "tree_bias_padding": Declared(INT64, (2,)),
        "logit_rows": Declared(INT64, ("logit_rows",)),
    }


def block_outputs(facts: ArchitectureRecord, confidence: bool) -> dict[str, Declared]:
    """What comes out of it but for its caches."""
    logits = {"logits": Declared(FLOAT, (1, "logit_rows", facts.logits_size))}
    return {**logits, "confidence": Declared(FLOAT, (1, "logit_rows", 1))} if confidence else logits


def block_rules(block: int) -> dict[tuple[str, str], Rule]:
    """The rules of a graph whose block has so many rows."""

    def concatenate(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
        first = given(inputs[0], (*FLOATS, INT64))
        if first.dtype == INT64:  # the anchor and masks, all of which the embedding must have
            need(graph.name(inputs[0]) == "input_ids")
            given(inputs[1], INT64, (1, block - 1))
            masks = np.frombuffer(graph.contents(inputs[1]), "<i8")
            need(len(masks) == block - 1 and masks.min() >= 0 and masks.max() < graph.facts.readable_ids)
            return [Declared(INT64, (1, block))]
        need(first.shape[:2] == (1, "tap_rows") and len(first.shape) == 3)
        given(inputs[1], first.dtype, (1, block, last_size(first)))
        return [Declared(first.dtype, (1, "key_rows", last_size(first)))]

    def gather(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
        data, rows = given(inputs[0], FLOATS), given(inputs[1], INT64)
        if attributes["axis"] == 0:
            need(graph.names_rows(inputs[1]))
            need(data.shape == (graph.facts.readable_ids, graph.facts.hidden_size))
            return [Declared(data.dtype, (*rows.shape, last_size(data)))]
        # Of what has so many rows, those that the runtime names.
        sources: dict[str, int | str] = {"query_rows": block, "key_rows": "key_rows", "logit_rows": block}
        name = graph.name(inputs[1])
        need(name in sources and len(data.shape) == 3 and data.shape[:2] == (1, sources[name]))
        return [Declared(data.dtype, (1, *rows.shape, last_size(data)))]

    def cut(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
        x = given(inputs[0], (*FLOATS, INT64))
        try:
            constants(graph, inputs[1], -block)
        except MismatchError:
            return RULES["", "Slice"].shape(graph, inputs, attributes)
        constants(graph, inputs[2], _EVERYTHING)
        constants(graph, inputs[3], 1)
        need(x.shape[:2] in ((1, "rows"), (1, "key_rows")))
        return [Declared(x.dtype, (1, block, *x.shape[2:]))]

    def turn(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
        x, facts = given(inputs[0], FLOATS), graph.facts
        need(len(x.shape) == 3 and attributes["num_heads"] in (facts.heads, facts.kv_heads))
        need(last_size(x) == int(attributes["num_heads"]) * facts.head_size)
        given(inputs[1], INT64, x.shape[:2])
        cos, sin = given(inputs[2], x.dtype), given(inputs[3], x.dtype)
        need(cos.shape == sin.shape and len(cos.shape) == 2)
        # Rows are looked up by position, and the block's lie behind the last feature's.
        need(isinstance(cos.shape[0], int) and cos.shape[0] > graph.positions + block)
        size = 2 * last_size(cos)
        need(size == attributes["rotary_embedding_dim"] and size in [rope.size for rope in facts.ropes])
        return [x]

    return {
        **{kind: RULES[kind] for kind in _KINDS},
        ("", "Concat"): Rule((2,), (1,), {"axis": (1,)}, concatenate),
        ("", "Gather"): Rule((2,), (1,), {"axis": (0, 1)}, gather),
        ("", "Slice"): Rule((4,), (1,), {}, cut),
        (CONTRIB, "RotaryEmbedding"): Rule((4,), (1,), {"num_heads": int, "rotary_embedding_dim": int}, turn),
    }
