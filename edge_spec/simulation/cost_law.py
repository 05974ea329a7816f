"""What calls of a model cost on a device that is not here: the longer of reading and computing, and launching."""

from __future__ import annotations

from math import ceil
from typing import Literal

from edge_spec.manifest import ModelRecord
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.simulation.device_class import DeviceClass
from edge_spec.simulation.model_sizes import ModelSizes, weight_bytes

# How several rows are multiplied by int4 weights. ``batched``: by a kernel that reads the weights once for up to 16
# rows (ONNX Runtime from 1.28 on). ``rows``: there is none, as in the wheels for JetPack 6, so each row reads them.
Kernels = Literal["batched", "rows"]

_BATCH = 16
# Row counts of the curve; it is straight between them.
_ROWS = (*range(1, _BATCH + 1), 17, 24, 32, 33, 48, 49, 64)
# Where weights are widened to float16 before they are multiplied, two bytes of each are written and read again.
_WIDENED_BYTES = 4.0


def cost_curve(model: ModelRecord, device: DeviceClass, kernels: Kernels, row_share: float) -> CostCurve:
    """Derive the curve that a calibration might find.

    Args:
        model: of a bundle for CUDA.
        device: what it runs on.
        kernels: how several rows are multiplied.
        row_share: what each further row of a batched call costs, as a share of reading the weights once.

    Raises:
        RequestError: the model's recipe does not run on CUDA.
    """
    sizes = ModelSizes.of(model.architecture)
    bandwidth = device.bytes_per_second * device.share_of(sizes)
    speed = device.operations_per_second * device.compute_share
    reading = weight_bytes(sizes, model) / bandwidth
    widening = reading + _WIDENED_BYTES * sizes.weights / bandwidth

    def multiplying(rows: int) -> float:
        computing = 2.0 * sizes.weights * rows / speed
        if kernels == "rows":
            passes = reading * rows
        else:
            passes = reading * (ceil(rows / _BATCH) + row_share * (rows - ceil(rows / _BATCH)))
        return max(passes if rows == 1 else min(passes, widening), computing)

    def attending(rows: int) -> float:
        return max(sizes.cache_bytes / bandwidth, sizes.attention_operations * rows / speed)

    launching = device.launching(sizes)
    return CostCurve(
        _ROWS,
        tuple(launching + multiplying(rows) for rows in _ROWS),
        tuple(attending(rows) for rows in _ROWS),
    )
