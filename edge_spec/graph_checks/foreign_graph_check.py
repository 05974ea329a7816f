"""Whether a graph by way of optimum is one that ONNX Runtime can be given (docs/security.md).

Such graphs have as many shapes as there are models, so there is no list of what belongs where, as
:mod:`edge_spec.graph_checks.graph_rules` has for the exporter's own. But all their nodes are standard operators, whose
kernels compare the shapes they are given, and of the one contributed kernel, which reads a weight by the size its
attributes claim, sizes are compared here. No operator of the list opens a file, runs another graph, or keeps anything
from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_spec.manifest import ArchitectureRecord
from edge_spec.onnx_file import BOOL, FLOAT, FLOAT16, INT32, INT64, UINT8, Declared, GraphError, Node, OnnxGraph

_CONTRIB = "com.microsoft"
# Of the standard operators; what the exporter of optimum-onnx writes lies in between.
_FIRST_OPSET, _LAST_OPSET = 14, 23
_BLOCK_SIZES = (16, 32, 64, 128, 256)
# Numbers; ONNX's double is 11.
_CAST_TO = (FLOAT, INT32, INT64, BOOL, FLOAT16, 11)

# Beyond this no model for a small machine goes.
_MOST_NODES = 65_536


@dataclass(frozen=True)
class _Kind:
    """How many inputs and outputs nodes of a kind have, and of which type their attributes are."""

    inputs: range
    outputs: range
    attributes: Mapping[str, type]


def _kind(fewest: int, most: int | None = None, outputs: int = 1, **attributes: type) -> _Kind:
    return _Kind(range(fewest, (most or fewest) + 1), range(1, outputs + 1), attributes)


_MANY = 64
_OF_ONE = (
    "Abs Ceil Cos Erf Exp Floor IsNaN Log Neg NonZero Not Reciprocal Relu Round Sigmoid Sign Sin Softplus Sqrt Tanh"
)
_OF_TWO = "Add And Div Equal Expand Greater GreaterOrEqual Less LessOrEqual MatMul Mul Or Pow Sub Tile Xor"
_STANDARD: dict[str, _Kind] = {
    **dict.fromkeys(_OF_ONE.split(), _kind(1)),
    **dict.fromkeys(_OF_TWO.split(), _kind(2)),
    **dict.fromkeys(("Max", "Min"), _kind(1, _MANY)),
    **dict.fromkeys(("Elu", "HardSigmoid", "LeakyRelu"), _kind(1, alpha=float, beta=float)),
    **dict.fromkeys(("Gather", "GatherElements"), _kind(2, axis=int)),
    **dict.fromkeys(
        ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _kind(1, 2, keepdims=int, noop_with_empty_axes=int)
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Flatten"), _kind(1, axis=int)),
    "Cast": _kind(1, to=int, saturate=int),
    "Clip": _kind(1, 3),
    "Concat": _kind(1, _MANY, axis=int),
    "CumSum": _kind(2, exclusive=int, reverse=int),
    "GatherND": _kind(2, batch_dims=int),
    "Gelu": _kind(1, approximate=str),
    "LayerNormalization": _kind(2, 3, axis=int, epsilon=float, stash_type=int),
    "Mod": _kind(2, fmod=int),
    "RMSNormalization": _kind(2, axis=int, epsilon=float, stash_type=int),
    "Range": _kind(3),
    "Reshape": _kind(2, allowzero=int),
    "ScatterElements": _kind(3, axis=int, reduction=str),
    "ScatterND": _kind(3, reduction=str),
    "Shape": _kind(1, start=int, end=int),
    "Slice": _kind(3, 5),
    "Split": _kind(1, 2, outputs=_MANY, axis=int, num_outputs=int),
    "Squeeze": _kind(1, 2),
    "TopK": _kind(2, outputs=2, axis=int, largest=int, sorted=int),
    "Transpose": _kind(1, perm=tuple),
    "Trilu": _kind(1, 2, upper=int),
    "Unsqueeze": _kind(2),
    "Where": _kind(3),
}
_KINDS = {("", name): kind for name, kind in _STANDARD.items()} | {
    (_CONTRIB, "MatMulNBits"): _kind(3, 4, K=int, N=int, bits=int, block_size=int, accuracy_level=int)
}


def check_foreign_graph(parsed: OnnxGraph, facts: ArchitectureRecord) -> None:
    """Check a graph by way of optimum, whose weights are known to lie in the bundle.

    Args:
        parsed: the graph as read.
        facts: sizes that its inputs and outputs must have.

    Raises:
        GraphError: it is not what :mod:`edge_spec.export.optimum_graph` writes.
    """
    opsets = dict(parsed.opsets)
    if not _FIRST_OPSET <= opsets.pop("", 0) <= _LAST_OPSET or opsets not in ({}, {_CONTRIB: 1}):
        raise GraphError(f"its operator sets are {dict(parsed.opsets)}")
    constants = {name: Declared(tensor.dtype, tensor.shape) for name, tensor in parsed.initializers.items()}
    for what, found, expected in (
        ("inputs", parsed.inputs, _inputs(facts)),
        ("outputs", parsed.outputs, _outputs(facts)),
        ("declared values", parsed.declared, {name: constants.get(name) for name in parsed.declared}),
    ):
        if dict(found) != expected:
            raise GraphError(f"its {what} are not those of its architecture ({_first_difference(found, expected)})")
    if len(parsed.nodes) > _MOST_NODES:
        raise GraphError(f"it has {len(parsed.nodes):,} nodes")
    known = {*parsed.inputs, *parsed.initializers}
    if len(known) < len(parsed.inputs) + len(parsed.initializers):
        raise GraphError("an input and an initializer have the same name")
    for node in parsed.nodes:
        _check_node(node)
        if unknown := [name for name in node.inputs if name and name not in known]:
            raise GraphError(f"{_shown(node)} uses {unknown[0]!r}, which nothing before it gives")
        if (node.domain, node.kind) == (_CONTRIB, "MatMulNBits"):
            _check_blocks(node, parsed)
        for name in node.outputs:
            if not name or name in known:
                raise GraphError(f"two values are called {name!r}")
            known.add(name)
    computed = {name for node in parsed.nodes for name in node.outputs}
    if missing := [name for name in parsed.outputs if name not in computed]:
        raise GraphError(f"no node gives its output {missing[0]!r}")


def _check_node(node: Node) -> None:
    kind = _KINDS.get((node.domain, node.kind))
    if kind is None:
        raise GraphError(f"{_shown(node)} is of a kind that is not among those allowed")
    if len(node.inputs) not in kind.inputs or len(node.outputs) not in kind.outputs:
        raise GraphError(f"{_shown(node)} has {len(node.inputs)} inputs and {len(node.outputs)} outputs")
    for name, value in node.attributes.items():
        if name not in kind.attributes or type(value) is not kind.attributes[name]:
            raise GraphError(f"{_shown(node)} has the attribute {name} = {value!r}, which is not among those allowed")
    if node.kind == "Cast" and node.attributes.get("to") not in _CAST_TO:
        raise GraphError(f"{_shown(node)} makes something else than numbers")


def _check_blocks(node: Node, parsed: OnnxGraph) -> None:
    """Raise GraphError unless the weights of a matrix in 4 bits are as large as the node says."""
    attributes = dict(node.attributes)
    inputs, outputs, block = (attributes.get(name) for name in ("K", "N", "block_size"))
    if not isinstance(inputs, int) or not isinstance(outputs, int) or not inputs > 0 < outputs:
        raise GraphError(f"{_shown(node)} has no size")
    if attributes.get("bits") != 4 or block not in _BLOCK_SIZES or attributes.get("accuracy_level", 0) not in range(5):
        raise GraphError(f"{_shown(node)} has blocks that no kernel takes")
    assert isinstance(block, int)  # those are
    blocks = -(-inputs // block)
    expected = [
        (UINT8, (outputs, blocks, block // 2)),
        (FLOAT, (outputs, blocks)),
        (UINT8, (outputs, -(-blocks // 2))),
    ]
    for name, (dtype, shape) in zip(node.inputs[1:], expected, strict=False):
        tensor = parsed.initializers.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
            raise GraphError(f"{_shown(node)} has {name!r} as a weight, expected a constant of shape {list(shape)}")


def _inputs(facts: ArchitectureRecord) -> dict[str, Declared]:
    cache = Declared(FLOAT, (1, facts.kv_heads, "capacity", facts.head_size))
    return {
        "input_ids": Declared(INT64, (1, "rows")),
        "past_length": Declared(INT64, (1,)),
        "logit_rows": Declared(INT64, ("logit_rows",)),
        **dict.fromkeys(_slots("past_key_values", facts), cache),
    }


def _outputs(facts: ArchitectureRecord) -> dict[str, Declared]:
    rows = Declared(FLOAT, (1, facts.kv_heads, "rows", facts.head_size))
    logits = Declared(FLOAT, (1, "logit_rows", facts.logits_size))
    return {"logits": logits, **dict.fromkeys(_slots("new", facts), rows)}


def _slots(prefix: str, facts: ArchitectureRecord) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(facts.layers) for part in ("key", "value")]


def _shown(node: Node) -> str:
    return f"node {node.kind!r} ({', '.join(node.outputs)[:60]})"


def _first_difference(found: Mapping[str, Declared], expected: Mapping[str, Declared | None]) -> str:
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            return f"{name} is {found.get(name)}, expected {expected.get(name)}"
    return "their order"
