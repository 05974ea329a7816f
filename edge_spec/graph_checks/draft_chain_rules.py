"""Rules of the nodes in graphs that draft several tokens in a call (edge_spec/export/draft_chain_graph.py).

All steps write into the same cache, and each looks up the token that the one before has chosen. So what decides where
a step writes and what it looks up is known exactly here: the runtime's length plus the number of the step, and a column
of the logits, or the id that a table of the bundle's own has for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import (
    FLOATS,
    Attributes,
    Inputs,
    Rule,
    Surroundings,
    constants,
    given,
    last_size,
    need,
)
from edge_spec.graph_checks.graph_rules import RULES
from edge_spec.onnx_file import FLOAT, INT32, INT64, Declared

# The name of the noise's columns, which are as many as the logits', or one.
NOISE_COLUMNS = "noise_columns"


def _gather(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    data, indices = given(inputs[0], (*FLOATS, INT64)), given(inputs[1], INT64)
    if graph.name(inputs[0]) == "noise":
        need(attributes["axis"] == 0)
        _constant_between(graph, inputs[1], INT64, 0, graph.steps - 1)
        return [Declared(FLOAT, (1, NOISE_COLUMNS))]
    if data.dtype == INT64:
        need(attributes["axis"] == 0 and graph.kind(inputs[1]) == "ArgMax")
        given(data, INT64, (graph.columns,))
        need(bool(graph.column_ids) and graph.contents(inputs[0]) == graph.column_ids)
        return [indices]
    if attributes["axis"] == 0:
        need(graph.names_rows(inputs[1]))
        need(data.shape == (graph.facts.readable_ids, graph.facts.hidden_size))
        return [Declared(data.dtype, (*indices.shape, last_size(data)))]
    need(data.shape == (1, "rows", graph.facts.hidden_size))
    constants(graph, inputs[1], -1)
    return [Declared(data.dtype, (1, 1, last_size(data)))]


def _add(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    if inputs[0] is not None and inputs[0].dtype == INT32:
        need(graph.name(inputs[0]) == "seqlens_k")
        _constant_between(graph, inputs[1], INT32, 1, graph.steps - 1)
        return [Declared(INT32, (1,))]
    if inputs[1] is not None and inputs[1].shape == (1, NOISE_COLUMNS):
        return [given(inputs[0], FLOAT, (1, graph.columns))]
    return RULES["", "Add"].shape(graph, inputs, attributes)


def _slice(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = given(inputs[0], FLOATS)
    if x.shape != (1, 1, graph.facts.logits_size):
        return RULES["", "Slice"].shape(graph, inputs, attributes)
    for value, number in zip(inputs[1:], (0, graph.columns, 2), strict=True):
        constants(graph, value, number)
    return [Declared(given(x, FLOAT).dtype, (1, 1, graph.columns))]


def _squeeze(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], FLOAT, (1, 1, graph.columns))
    constants(graph, inputs[1], 1)
    return [Declared(FLOAT, (1, graph.columns))]


def _likeliest(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], FLOAT, (1, graph.columns))
    return [Declared(INT64, (1, 1))]


def _softmax(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [given(inputs[0], FLOAT, (1, graph.columns))]


def _share(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    given(inputs[0], FLOAT, (1, graph.columns))
    given(inputs[1], INT64, (1, 1))
    need(graph.kind(inputs[1]) == "ArgMax")
    return [Declared(FLOAT, (1, 1))]


def _concatenate(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = given(inputs[0], (FLOAT, INT64), (1, 1))
    for value in inputs[1:]:
        given(value, first.dtype, (1, 1))
    return [Declared(first.dtype, (1, len(inputs)))]


def _constant_between(graph: Surroundings, value: Declared | None, dtype: int, smallest: int, largest: int) -> None:
    """Ask for a constant [1] that is one of these numbers."""
    given(value, dtype, (1,))
    contents = graph.contents(value)
    need(bool(contents) and smallest <= int.from_bytes(contents, "little", signed=True) <= largest)


def draft_chain_rules(steps: int) -> dict[tuple[str, str], Rule]:
    """The rules of a graph that drafts so many tokens."""
    return {
        **RULES,
        ("", "Gather"): Rule((2,), (1,), {"axis": (0, 1)}, _gather),
        ("", "Add"): Rule((2,), (1,), {}, _add),
        ("", "Slice"): Rule((4,), (1,), {}, _slice),
        ("", "Squeeze"): Rule((2,), (1,), {}, _squeeze),
        ("", "ArgMax"): Rule((1,), (1,), {"axis": (1,), "keepdims": (1,)}, _likeliest),
        ("", "Softmax"): Rule((1,), (1,), {"axis": (1,)}, _softmax),
        ("", "GatherElements"): Rule((2,), (1,), {"axis": (1,)}, _share),
        ("", "Concat"): Rule((steps,), (1,), {"axis": (1,)}, _concatenate),
    }
