"""Outputs of a written graph that tell its hidden states, for heads that draft from them (docs/heads.md).

``hidden.i`` is the residual stream after i decoder layers, as the checkpoint has it: where the weights are rotated, the
rotation is undone. They come behind the graph, whose own nodes and results stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from edge_spec.errors import EdgeSpecError
from edge_spec.export.graph_tape import describe
from edge_spec.export.rotation import Rotation
from edge_spec.manifest import tap_name


def eagle3_taps(layers: int) -> tuple[int, int, int]:
    """Where EAGLE-3 (Li et al. 2025) taps a model unless a head says otherwise: early, in the middle, and late."""
    return 2, layers // 2, layers - 3


def set_taps(
    model: ir.Model,
    taps: Sequence[int],
    layers: int,
    hidden_size: int,
    dtype: ir.DataType,
    rotation: Rotation | None,
) -> None:
    """Let a graph have an output for each of these taps and no others, in place.

    Args:
        model: a graph of :func:`edge_spec.export.graph.build_graph`, perhaps read from a file.
        taps: after how many layers, each 1 to ``layers``, ascending.
        layers: how many the model has.
        hidden_size: elements of its residual stream.
        dtype: the compute type.
        rotation: of its residual stream, if that is rotated.

    Raises:
        EdgeSpecError: there is no such layer.
    """
    check_taps(taps, layers)
    graph = model.graph
    others = [value for value in graph.outputs if not (value.name or "").startswith("hidden.")]
    if len(others) < len(graph.outputs):
        graph.outputs[:] = others
        RemoveUnusedNodesPass()(model)
    streams = _streams(graph, layers)
    tape = Tape(graph)
    constants: dict[str, ir.Value] = {}

    def constant(name: str, array: np.ndarray) -> ir.Value:
        if name not in constants:
            constants[name] = tape.initializer(ir.tensor(array, name=name))
        return constants[name]

    for tap in taps:
        stream = streams[tap]
        if rotation is not None:
            # Undone in the order of its factors: x R = L (x diag(s) K) in pieces of the rows, all of them orthogonal.
            left, right, signs = (factor.astype(dtype.numpy()) for factor in rotation.factors)
            apart = constant("stream_apart", np.array([0, 0, len(left), len(right)], np.int64))
            together = constant("stream_together", np.array([0, 0, hidden_size], np.int64))
            stream = tape.op(
                "MatMul", [tape.op("Reshape", [stream, apart]), constant("unrotate_right", right.T.copy())]
            )
            stream = tape.op("MatMul", [constant("unrotate_left", left.T.copy()), stream])
            stream = tape.op("Mul", [tape.op("Reshape", [stream, together]), constant("unrotate_signs", signs)])
        graph.outputs.append(describe(stream, tap_name(tap), dtype, [1, "rows", hidden_size]))


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise EdgeSpecError unless they are numbers of layers of a model with so many, ascending."""
    if list(taps) != sorted(set(taps)) or any(not 1 <= tap <= layers for tap in taps):
        raise EdgeSpecError(
            f"The taps are {list(taps)}, expected ascending numbers from 1 to {layers}: each tells the hidden states "
            "behind so many decoder layers."
        )


def _streams(graph: ir.Graph, layers: int) -> dict[int, ir.Value]:
    """The residual stream [1, rows, hidden] by how many layers it has passed."""
    found = {}
    for node in graph:
        parts = (node.name or "").split(".")
        # The norm before a layer sums what the layer before has added, and gives the sum as well.
        if node.op_type == "SkipSimplifiedLayerNormalization" and parts[0] == "layers" and parts[2:] == ["input_norm"]:
            found[int(parts[1])] = node.outputs[3]
        if node.op_type == "Gather" and node.inputs[1] is not None and node.inputs[1].name == "logit_rows":
            last = node.inputs[0]
            assert last is not None  # it gathers from something
            found[layers] = last
    return found
