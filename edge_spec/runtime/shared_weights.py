"""Weights that lie once on the device, for all sessions of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.onnx_file import FLOAT, FLOAT16, INT8, INT32, INT64, UINT8, Tensor
from edge_spec.runtime.device_settings import Lending
from edge_spec.runtime.probe_models import WEIGHTED_SUM_MODEL
from edge_spec.runtime.provider import CPU_PROVIDER

_NUMPY: dict[int, Any] = {
    FLOAT: np.float32,
    FLOAT16: np.float16,
    UINT8: np.uint8,
    INT8: np.int8,
    INT32: np.int32,
    INT64: np.int64,
}

# Tensors below this stay with each session: ONNX Runtime looks into small ones while it optimizes a graph.
_SMALLEST = 1 << 12


class SharedWeights:
    """Values on a device over the tensors of weight files, each made when it is first asked for.

    They are given to sessions by ``SessionOptions.add_initializer``, which takes only values that do not own their
    memory, and has to keep them for as long as the session.
    """

    def __init__(self, onnxruntime: Any, device: str, lending: Lending = "dlpack") -> None:
        """Start without values.

        Args:
            onnxruntime: the imported module.
            device: ``"cpu"`` or ``"cuda"``.
            lending: how values are made that do not own their memory.
        """
        self._lending = lending
        self._ort = onnxruntime
        self._device = device
        self._values: dict[tuple[Path, int, str], Any] = {}

    def values(self, folder: Path, initializers: Mapping[str, Tensor]) -> dict[str, Any]:
        """The values of a graph's larger tensors, by name.

        Args:
            folder: where the graph lies.
            initializers: those of the graph, checked.
        """
        if sys.byteorder != "little":  # as the files are
            return {}
        return {
            name: self._value(folder, name, tensor)
            for name, tensor in initializers.items()
            if tensor.external is not None and tensor.external.length >= _SMALLEST and tensor.dtype in _NUMPY
        }

    def _value(self, folder: Path, name: str, tensor: Tensor) -> Any:
        assert tensor.external is not None
        file = folder / tensor.external.location
        key = (file, tensor.external.offset, name)
        if key not in self._values:
            array = np.memmap(file, _NUMPY[tensor.dtype], "r", tensor.external.offset, tensor.shape)
            self._values[key] = lent_value(self._ort, array, self._device, self._lending)
        return self._values[key]


def lent_value(onnxruntime: Any, array: np.ndarray, device: str, lending: Lending = "dlpack") -> Any:
    """A value with the contents of an array that does not own its memory, and keeps what does.

    Args:
        onnxruntime: the imported module.
        array: the contents.
        device: where the value lies.
        lending: how it is made.

    Raises:
        AttributeError: this ONNX Runtime was built without DLPack.
    """
    owner = onnxruntime.OrtValue.ortvalue_from_numpy(array, device)
    inner = owner._ortvalue
    if lending == "dlpack":
        lent = onnxruntime.OrtValue(type(inner).from_dlpack(inner.to_dlpack()))
    else:  # an output that is bound to memory of the caller's is such a value, whatever the session computes
        session = onnxruntime.InferenceSession(WEIGHTED_SUM_MODEL, providers=[CPU_PROVIDER])
        binding = session.io_binding()
        binding.bind_output("y", device, 0, array.dtype.type, list(array.shape), owner.data_ptr())
        lent = binding.get_outputs()[0]
    lent.owner = owner
    return lent
