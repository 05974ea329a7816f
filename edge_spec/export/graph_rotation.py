"""The nodes that rotate rows as a stored residual stream is rotated, and back (edge_spec/export/rotation.py)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_tape import GraphTape
from edge_spec.export.rotation import Rotation


def rotated(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rows [1, rows, size] times R, in the order of its factors: L (x diag(s) K) in pieces of the rows."""
    left, right, signs = _factors(tape, rotation)
    pieces = _apart(tape, tape.op("Mul", [x, tape.constant("turn_signs", signs)]), rotation)
    pieces = tape.op("MatMul", [pieces, tape.constant("turn_right", right)])
    return _together(tape, tape.op("MatMul", [tape.constant("turn_left", left), pieces]), rotation)


def unrotated(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rows [1, rows, size] of a rotated stream times R transposed: its factors are orthogonal, or signs."""
    left, right, signs = _factors(tape, rotation)
    pieces = tape.op("MatMul", [_apart(tape, x, rotation), tape.constant("unturn_right", right.T.copy())])
    pieces = tape.op("MatMul", [tape.constant("unturn_left", left.T.copy()), pieces])
    return tape.op("Mul", [_together(tape, pieces, rotation), tape.constant("turn_signs", signs)])


def _factors(tape: GraphTape, rotation: Rotation) -> tuple[np.ndarray, ...]:
    return tuple(factor.astype(tape.dtype.numpy()) for factor in rotation.factors)


def _apart(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    left, right, _ = rotation.factors
    return tape.op("Reshape", [x, tape.constant("turn_apart", np.array([0, 0, len(left), len(right)], np.int64))])


def _together(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    size = len(rotation.factors[2])
    return tape.op("Reshape", [x, tape.constant("turn_together", np.array([0, 0, size], np.int64))])
