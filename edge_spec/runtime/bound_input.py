"""One input of a session call, where the kernels read it: on a device, or in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BoundInput:
    """Memory that is bound to an input, and what lies there. ONNX Runtime owns it, and the binding keeps it.

    An array in CPU memory could not be bound once for a kernel on a device: ONNX Runtime copies it when it is bound.
    """

    def __init__(
        self, onnxruntime: Any, binding: Any, name: str, shape: Sequence[int], dtype: Any, device: str
    ) -> None:
        """Allocate the memory, fill it with zeros, and bind it.

        Args:
            onnxruntime: the imported module.
            binding: of the session.
            name: of the input.
            shape: of the input.
            dtype: numpy type of the input.
            device: where its kernels read it.
        """
        self.shape, self.dtype = tuple(shape), dtype
        self._held = np.zeros(self.shape, dtype)
        self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, device)
        if self._held.size:
            self._value.update_inplace(self._held)
        binding.bind_ortvalue_input(name, self._value)

    def write(self, numbers: Any) -> None:
        """Copy numbers to the device, unless they are there."""
        array = np.asarray(numbers, self.dtype).reshape(self.shape)
        if not np.array_equal(array, self._held):
            self._value.update_inplace(array)
            self._held = array
