"""Rules of the nodes in graphs of recurrent heads (edge_spec/export/heads/recurrent_graph.py).

Most are a decoder's. What is new are the two places where values come together: the rows that the target tells with
those that the head told itself, and each row's embedding with its hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import FLOATS, Attributes, Inputs, Rule, Surroundings, given, last_size, need
from edge_spec.graph_checks.graph_rules import RULES
from edge_spec.onnx_file import Declared

# What the rows of a call are called: those with hidden states of the target, and those with features of the head.
TAP_ROWS, FEATURE_ROWS = "tap_rows", "feature_rows"


def _concatenate(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = given(inputs[0], FLOATS)
    hidden = graph.facts.hidden_size
    need(last_size(first) == hidden)
    if attributes["axis"] == 1:
        need(first.shape == (1, TAP_ROWS, hidden) and graph.name(inputs[1]) == "features")
        given(inputs[1], first.dtype, (1, FEATURE_ROWS, hidden))
        return [Declared(first.dtype, (1, "rows", hidden))]
    need(first.shape == (1, "rows", hidden))
    given(inputs[1], first.dtype, first.shape)
    return [Declared(first.dtype, (1, "rows", 2 * hidden))]


RECURRENT_HEAD_RULES: dict[tuple[str, str], Rule] = {
    **RULES,
    ("", "Concat"): Rule((2,), (1,), {"axis": (1, -1)}, _concatenate),
}
