"""The attention bias of layers that see a window of the most recent tokens, also where the rows are a tree."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_tape import GraphTape


def window_bias(tape: GraphTape, bias: ir.Value, positions: ir.Value, padding: ir.Value, window: int) -> ir.Value:
    """Hide from each row what lies ``window`` tokens or more before it.

    Age is counted in tokens of the row's own path: the call's first row sits right behind the cache, and any other as
    many tokens later as its position says. So a window is the same whether its tokens came as a chain or in a tree,
    and a cache that has lost tokens in its middle, as a draft's may, goes on showing as many as it holds.

    Args:
        tape: records the nodes.
        bias: [1, 1, rows, total], of layers that see everything.
        positions: int64 [1, rows].
        padding: int64 [2], tokens in the cache and 0.
        window: tokens a row sees, itself included.

    Returns:
        [1, 1, rows, total].
    """
    zero, one = tape.constant("zero", np.int64(0)), tape.constant("one_token", np.int64(1))
    cached = tape.op("Gather", [padding, zero], {"axis": 0})
    first = tape.op("Gather", [positions, zero], {"axis": 1})
    slots = tape.op("Add", [tape.op("Sub", [positions, first]), cached])
    in_cache = tape.op("Range", [zero, cached, one])
    in_call = tape.op("Squeeze", [slots, tape.constant("batch_axis", np.array([0], np.int64))])
    columns = tape.op("Concat", [in_cache, in_call], {"axis": 0})
    rows = tape.op("Unsqueeze", [slots, tape.constant("column_axis", np.array([2], np.int64))])
    age = tape.op("Sub", [rows, columns])
    seen = tape.op("Less", [age, tape.constant("window", np.int64(window))])
    return tape.op("Where", [seen, bias, tape.constant("hidden", tape.number(-np.inf))])
