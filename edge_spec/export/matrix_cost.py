"""What a layer class costs on this device in each format: its matrices alone, through the exporter's own nodes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.graph_matrix import multiply
from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.export.packing import Packer, ReadRows
from edge_spec.export.recipe import AUTO, MatrixFormat
from edge_spec.export.weights import open_weight_file
from edge_spec.heap import give_back
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.processor import integer_products_saturate

# The formats that are compared.
COMPARED: tuple[MatrixFormat, ...] = ("w8a8", "int4")

# Bytes of 4-bit weights that one run reads: twice a large cache of the processors this is meant for, so that they come
# from memory, as where a whole model lies between two uses of a matrix. Tiny matrices are not worth more copies.
_BYTES_READ = 64 << 20
_MOST_COPIES = 256

# Rows of lm_head that are measured; time is proportional to them from far fewer on.
_MOST_OUTPUTS = 32768

# Runs of each format and number of rows. The first of each also warms up and is not counted.
_REPETITIONS = 9


@dataclass(frozen=True)
class ClassCost:
    """Seconds that all matrices of one layer class take, averaged over the numbers of rows that count, by format."""

    w8a8: float
    int4: float

    @property
    def ratio(self) -> float:
        """Time of int4 over that of w8a8."""
        return self.int4 / self.w8a8


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [outputs, inputs], and how many of its size a model has; part of one where it was cut for measuring.

    ``mixed``: as in :meth:`~edge_spec.export.packing.Packer.matrix`.
    """

    outputs: int
    inputs: int
    count: float
    mixed: bool = False


def class_matrices(architecture: Architecture) -> dict[str, tuple[MatrixShape, ...]]:
    """Return the matrices of each layer class, as the graph runs them."""
    facts = architecture
    hidden, attended = facts.hidden_size, facts.heads * facts.head_size
    head = min(facts.logits_size, _MOST_OUTPUTS)
    return {
        "attention": (
            MatrixShape((facts.heads + 2 * facts.kv_heads) * facts.head_size, hidden, facts.layers),
            MatrixShape(hidden, attended, facts.layers),
        ),
        "mlp_up": (MatrixShape(2 * facts.intermediate_size, hidden, facts.layers),),
        "mlp_down": (MatrixShape(hidden, facts.intermediate_size, facts.layers, mixed=True),),
        "lm_head": (MatrixShape(head, hidden, facts.logits_size / head),),
    }


def measure_class(matrices: Sequence[MatrixShape], rows: Sequence[int], block_size: int, folder: Path) -> ClassCost:
    """Time the matrices of a layer class, with random weights.

    Args:
        matrices: of the class.
        rows: numbers of rows a call has; all count the same.
        block_size: of int4.
        folder: empty; graphs and weights are left in it.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    seconds = dict.fromkeys(COMPARED, 0.0)
    for index, matrix in enumerate(matrices):
        for storage, each in _measure(matrix, rows, block_size, folder, str(index)).items():
            seconds[storage] += matrix.count * each
    return ClassCost(**{storage: seconds[storage] for storage in COMPARED})


def _measure(
    matrix: MatrixShape, rows: Sequence[int], block_size: int, folder: Path, name: str
) -> dict[MatrixFormat, float]:
    """Seconds of one multiplication in each format: the mean over the numbers of rows of the medians."""
    copies = min(_MOST_COPIES, math.ceil(_BYTES_READ / (matrix.outputs * matrix.inputs / 2)))
    sessions = {
        storage: _session(matrix, storage, copies, block_size, folder, f"{name}.{storage}") for storage in COMPARED
    }
    generator = np.random.default_rng(0)
    taken: dict[tuple[MatrixFormat, int], list[float]] = {(storage, n): [] for storage in COMPARED for n in rows}
    feeds = {n: _feeds(generator.standard_normal((copies, 1, n, matrix.inputs), np.float32)) for n in rows}
    # Formats take turns, so that whatever else the machine does slows both.
    for _ in range(_REPETITIONS + 1):
        for storage, n in taken:
            started = time.perf_counter()
            sessions[storage].run(None, feeds[n])
            taken[storage, n].append((time.perf_counter() - started) / copies)
    del sessions
    give_back()
    medians = {call: statistics.median(times[1:]) for call, times in taken.items()}
    return {storage: statistics.mean(medians[storage, n] for n in rows) for storage in COMPARED}


def _feeds(values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    return {f"x.{copy}": each for copy, each in enumerate(values)}


def _session(matrix: MatrixShape, storage: MatrixFormat, copies: int, block_size: int, folder: Path, name: str) -> Any:
    """A session that multiplies by each of several copies of a matrix in turn, each with bytes and an input of its own.

    One input for all would have its rows rounded once for all of them.
    """
    tape, outputs = GraphTape("cpu"), []
    with open_weight_file(folder / f"{name}.data") as weights:
        packer = Packer(weights, replace(AUTO, block_size=block_size), "cpu", not integer_products_saturate())
        shape, rows = (matrix.outputs, matrix.inputs), _random_rows(matrix.inputs)
        packed = packer.matrix(f"{name}.0", shape, rows, storage, mixed=matrix.mixed)
        for copy in range(copies):
            own = packed
            if copy:
                tensors = {
                    part: weights.append(f"{name}.{copy}.{part}", tensor.numpy())
                    for part, tensor in packed.tensors.items()
                }
                own = replace(packed, tensors=tensors)
            x = tape.input(f"x.{copy}", ir.DataType.FLOAT, [1, "rows", matrix.inputs])
            y = multiply(tape, x, own, None, f"{name}.{copy}")
            outputs.append(describe(y, f"y.{copy}", ir.DataType.FLOAT, [1, "rows", matrix.outputs]))
    path = folder / f"{name}.onnx"
    ir.save(tape.finish(outputs), path)
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # As the runtime has it, so that idle threads of one session do not slow the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _random_rows(inputs: int) -> ReadRows:
    generator = np.random.default_rng(0)
    return lambda start, stop: generator.standard_normal((stop - start, inputs), np.float32)
