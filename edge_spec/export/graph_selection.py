"""The last nodes of a graph that selects: the likeliest tokens of each row, so that the rest can stay on the device."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.manifest import SELECTED_TOKENS


def select(tape: GraphTape, logits: ir.Value, columns: int, usable: int) -> list[ir.Value]:
    """Add the nodes that select, and return their outputs: logits and ids of the likeliest tokens, and log-sum-exp.

    Args:
        tape: the graph.
        logits: float32 [1, logit_rows, columns].
        columns: of the logits.
        usable: how many of the columns stand for ids; the others are padding, which nobody may select.
    """
    last = tape.constant("last_axis", np.array([-1], np.int64))
    if usable < columns:
        start = tape.constant("first_column", np.array([0], np.int64))
        stop = tape.constant("usable_columns", np.array([usable], np.int64))
        logits = tape.op("Slice", [logits, start, stop, last])
        describe(logits, "usable_logits", ir.DataType.FLOAT, [1, "logit_rows", usable])
    most = min(SELECTED_TOKENS, usable)
    count = tape.constant("selected_tokens", np.array([most], np.int64))
    top, ids = tape.multi("TopK", [logits, count], {"axis": -1, "largest": 1, "sorted": 1}, outputs=2)
    total = tape.op("ReduceLogSumExp", [logits, last], {"keepdims": 0})
    return [
        describe(top, "top_logits", ir.DataType.FLOAT, [1, "logit_rows", most]),
        describe(ids, "top_ids", ir.DataType.INT64, [1, "logit_rows", most]),
        describe(total, "log_sum_exp", ir.DataType.FLOAT, [1, "logit_rows"]),
    ]
