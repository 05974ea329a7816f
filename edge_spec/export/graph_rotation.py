"""The nodes that rotate rows as a stored residual stream is rotated, and back (edge_spec/export/rotation.py)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edge_spec.export.graph_tape import GraphTape
from edge_spec.export.rotation import Rotation


def rotated(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rows [1, rows, size] times R, in the order of its factors: L (x diag(s) K) in pieces of the rows."""
    left, right, signs = _factors(tape, rotation)
    size = len(signs)
    pieces = _apart(tape, tape.op("Mul", [x, tape.constant(f"turn_signs.{size}", signs)]), rotation)
    pieces = tape.op("MatMul", [pieces, tape.constant(f"turn_right.{size}", right)])
    return _together(tape, tape.op("MatMul", [tape.constant(f"turn_left.{size}", left), pieces]), rotation)


def unrotated(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    """Rows [1, rows, size] of a rotated stream times R transposed: its factors are orthogonal, or signs."""
    left, right, signs = _factors(tape, rotation)
    size = len(signs)
    pieces = tape.op("MatMul", [_apart(tape, x, rotation), tape.constant(f"unturn_right.{size}", right.T.copy())])
    pieces = tape.op("MatMul", [tape.constant(f"unturn_left.{size}", left.T.copy()), pieces])
    return tape.op("Mul", [_together(tape, pieces, rotation), tape.constant(f"turn_signs.{size}", signs)])


def _factors(tape: GraphTape, rotation: Rotation) -> tuple[np.ndarray, ...]:
    return tuple(factor.astype(tape.dtype.numpy()) for factor in rotation.factors)


def _apart(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    left, right, signs = rotation.factors
    shape = np.array([0, 0, len(left), len(right)], np.int64)
    return tape.op("Reshape", [x, tape.constant(f"turn_apart.{len(signs)}", shape)])


def _together(tape: GraphTape, x: ir.Value, rotation: Rotation) -> ir.Value:
    size = len(rotation.factors[2])
    return tape.op("Reshape", [x, tape.constant(f"turn_together.{size}", np.array([0, 0, size], np.int64))])
