"""The kinds of nodes that the exporter writes: what each is given, and the type and shape of what comes out.

A new kind of node in the exporter needs a rule here, in :mod:`edge_spec.graph_checks.matrix_rules`,
:mod:`edge_spec.graph_checks.attention_rules` or :mod:`edge_spec.graph_checks.selection_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.attention_rules import ATTENTION_RULES, first_entry, split_heads
from edge_spec.graph_checks.graph_rule import (
    CONTRIB,
    FLOATS,
    Attributes,
    Inputs,
    Rule,
    Surroundings,
    given,
    last_size,
    need,
)
from edge_spec.graph_checks.matrix_rules import MATRIX_RULES, first_column
from edge_spec.graph_checks.selection_rules import SELECTION_RULES, usable_columns
from edge_spec.onnx_file import FLOAT, INT64, Declared


def _gather(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    data, indices = given(inputs[0], (*FLOATS, INT64)), given(inputs[1], INT64)
    if data.dtype == INT64:
        return [first_entry(graph, inputs, attributes)]
    if attributes["axis"] == 0:
        need(graph.names_rows(inputs[1]))
        need(data.shape == (graph.facts.readable_ids, graph.facts.hidden_size))
        return [Declared(data.dtype, (*indices.shape, last_size(data)))]
    need(graph.name(inputs[1]) == "logit_rows" and data.shape[:2] == (1, "rows") and len(data.shape) == 3)
    return [Declared(data.dtype, (1, "logit_rows", last_size(data)))]


def _cast(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [Declared(int(attributes["to"]), given(inputs[0], FLOATS).shape)]


def _alike(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [given(inputs[0], FLOATS)]


def _broadcast(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = given(inputs[0], (*FLOATS, INT64))
    if first.dtype == INT64:
        given(inputs[1], INT64, ())
        return [given(first, INT64, (1, "rows"))]
    second = given(inputs[1], first.dtype)
    last = first.shape[-1:]
    # The second never makes the first larger.
    need(second.shape in (first.shape, (*first.shape[:-1], 1), last, (1,), ()))
    return [first]


def _norm(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    given(inputs[1], x.dtype, (last_size(x),))
    return [x]


def _skip_norm(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    given(inputs[1], x.dtype, x.shape)
    given(inputs[2], x.dtype, (last_size(x),))
    statistic = Declared(FLOAT, (*x.shape[:-1], 1))
    return [x, statistic, statistic, x]


def _split(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    if len(inputs) == 2:
        return split_heads(graph, inputs, attributes)
    need(last_size(x) % 2 == 0 and attributes.get("num_outputs") == 2)
    return [Declared(x.dtype, (*x.shape[:-1], last_size(x) // 2))] * 2


def _slice(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    rule = usable_columns if graph.name(inputs[0]) == "logits" else first_column
    return rule(graph, inputs, attributes)


# Operators, their numbers of inputs and outputs, and the values their attributes may have.
RULES: dict[tuple[str, str], Rule] = {
    **MATRIX_RULES,
    **ATTENTION_RULES,
    **SELECTION_RULES,
    ("", "Gather"): Rule((2,), (1,), {"axis": (0, 1)}, _gather),
    ("", "Cast"): Rule((1,), (1,), {"to": FLOATS}, _cast),
    ("", "Abs"): Rule((1,), (1,), {}, _alike),
    ("", "Sigmoid"): Rule((1,), (1,), {}, _alike),
    ("", "Gelu"): Rule((1,), (1,), {"approximate": ("tanh",)}, _alike),
    ("", "Add"): Rule((2,), (1,), {}, _broadcast),
    ("", "Mul"): Rule((2,), (1,), {}, _broadcast),
    ("", "Div"): Rule((2,), (1,), {}, _broadcast),
    ("", "RMSNormalization"): Rule((2,), (1,), {"axis": (-1,), "epsilon": float}, _norm),
    ("", "Slice"): Rule((4,), (1,), {}, _slice),
    ("", "Split"): Rule((1, 2), (2, 3), {"axis": (-1,), "num_outputs": (2,)}, _split, optional=("num_outputs",)),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): Rule((3,), (4,), {"epsilon": float}, _skip_norm),
}
