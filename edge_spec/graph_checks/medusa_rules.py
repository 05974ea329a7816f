"""Rules of the nodes in graphs of Medusa heads (export/heads/medusa_graph.py), and what such a graph is given."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.graph_checks.graph_rule import CONTRIB, FLOATS, Attributes, Inputs, Rule, Surroundings, given, need
from edge_spec.graph_checks.graph_rules import RULES
from edge_spec.onnx_file import FLOAT, Declared

# Everything else that decoders have works on tokens or a cache, and there are none.
_KINDS = (
    ("", "RMSNormalization"),
    ("", "MatMul"),
    ("", "Abs"),
    ("", "ReduceMax"),
    ("", "Add"),
    ("", "Mul"),
    ("", "Div"),
    ("", "Sigmoid"),
    ("", "Cast"),
    (CONTRIB, "QuantizeLinear"),
    (CONTRIB, "MatMulIntegerToFloat"),
    (CONTRIB, "MatMulNBits"),
)


def medusa_rules(heads: int) -> dict[tuple[str, str], Rule]:
    """The rules of a graph with so many heads."""

    def stack(graph: Surroundings, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
        first = given(inputs[0], FLOATS, (1, "tap_rows", graph.facts.logits_size))
        need(all(given(value, first.dtype, first.shape) == first for value in inputs))
        return [Declared(first.dtype, (heads, *first.shape[1:]))]

    return {**{kind: RULES[kind] for kind in _KINDS}, ("", "Concat"): Rule((heads,), (1,), {"axis": (0,)}, stack)}


def medusa_inputs(hidden_size: int, dtype: int) -> dict[str, Declared]:
    """What such a graph is given, in the type of activations."""
    return {"taps": Declared(dtype, (1, "tap_rows", hidden_size))}


def medusa_outputs(heads: int, columns: int) -> dict[str, Declared]:
    """What comes out of it."""
    return {"logits": Declared(FLOAT, (heads, "tap_rows", columns))}
