"""Rules of the nodes that select the likeliest tokens (edge_spec/export/graph_selection.py)."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import Attributes, Inputs, Rule, Surroundings, constants, given, need
from edge_spec.manifest import SELECTED_TOKENS
from edge_spec.onnx_file import FLOAT, INT64, Declared


def usable_columns(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    """Of the rule of Slice: the columns of the logits that stand for ids."""
    need(graph.selects and graph.columns < graph.facts.logits_size)
    given(inputs[0], FLOAT, (1, "logit_rows", graph.facts.logits_size))
    for value, number in zip(inputs[1:], (0, graph.columns, -1), strict=True):
        constants(graph, value, number)
    return [Declared(FLOAT, (1, "logit_rows", graph.columns))]


def _top(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _need_usable(graph, inputs[0])
    most = min(SELECTED_TOKENS, graph.columns)
    constants(graph, inputs[1], most)
    return [Declared(dtype, (1, "logit_rows", most)) for dtype in (FLOAT, INT64)]


def _log_sum_exp(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _need_usable(graph, inputs[0])
    constants(graph, inputs[1], -1)
    return [Declared(FLOAT, (1, "logit_rows"))]


def _need_usable(graph: Surroundings, value: Declared | None) -> None:
    """Ask for the logits, without their padding."""
    padded = graph.columns < graph.facts.logits_size
    need(graph.selects and graph.name(value) == ("usable_logits" if padded else "logits"))
    given(value, FLOAT, (1, "logit_rows", graph.columns))


SELECTION_RULES: dict[tuple[str, str], Rule] = {
    ("", "TopK"): Rule((2,), (2,), {"axis": (-1,), "largest": (1,), "sorted": (1,)}, _top),
    ("", "ReduceLogSumExp"): Rule((2,), (1,), {"keepdims": (0,)}, _log_sum_exp),
}
