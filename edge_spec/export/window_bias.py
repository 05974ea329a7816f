"""The attention bias of layers that see a window of the most recent tokens, also where the rows are a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape


def window_bias(
    tape: Tape,
    bias: ir.Value,
    positions: ir.Value,
    padding: ir.Value,
    window: int,
    hidden: np.generic,
    constant: Callable[[str, np.generic | np.ndarray], ir.Value],
) -> ir.Value:
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
        hidden: minus infinity, in the bias's type.
        constant: gives a constant of the graph by its name and value.

    Returns:
        [1, 1, rows, total].
    """
    zero, one = constant("zero", np.int64(0)), constant("one_token", np.int64(1))

    def op(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        given: Mapping[str, int] = attributes
        return tape.op(kind, list(inputs), given)

    cached = op("Gather", padding, zero, axis=0)
    first = op("Gather", positions, zero, axis=1)
    slots = op("Add", op("Sub", positions, first), cached)
    in_cache = op("Range", zero, cached, one)
    own = op("Squeeze", slots, constant("batch_axis", np.array([0], np.int64)))
    columns = op("Concat", in_cache, own, axis=0)
    rows = op("Unsqueeze", slots, constant("column_axis", np.array([2], np.int64)))
    seen = op("Less", op("Sub", rows, columns), constant("window", np.int64(window)))
    return op("Where", seen, bias, constant("hidden", hidden))
