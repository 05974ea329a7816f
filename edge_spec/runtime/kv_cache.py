"""The KV cache of one model: preallocated buffers that the graph updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.bundle import ArchitectureRecord
from edge_spec.errors import RequestError


class KVCache:
    """Keys and values of every layer, bound once as both past and present.

    Only the first ``length`` slots count, so taking tokens back is a smaller number: no copy, no clearing.

    Attributes:
        capacity: slots per layer, one token each.
        length: tokens held.
    """

    def __init__(self, onnxruntime: Any, facts: ArchitectureRecord, capacity: int, dtype: Any, device: str) -> None:
        """Allocate the buffers.

        Args:
            onnxruntime: the imported module.
            facts: sizes of the model.
            capacity: slots per layer.
            dtype: numpy type of the buffers.
            device: ``"cpu"`` or ``"cuda"``, where the buffers lie.
        """
        self.capacity = capacity
        self.length = 0
        self._device = device
        # Where nobody computed a token, any number that is not zero will do.
        self._filling = 1 if dtype is np.int8 else 0.01
        self._shape = [1, facts.kv_heads, capacity, facts.head_size]
        # ONNX Runtime has to own the memory: a value around a numpy array dangles once the array is freed.
        self._buffers = {
            f"{layer}.{part}": onnxruntime.OrtValue.ortvalue_from_shape_and_type(self._shape, dtype, device)
            for layer in range(facts.layers)
            for part in ("key", "value")
        }

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for the buffers."""
        return sum(int(value.tensor_size_in_bytes()) for value in self._buffers.values())

    def bind(self, binding: Any) -> None:
        """Bind every buffer to its past input and its present output."""
        for name, value in self._buffers.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            binding.bind_ortvalue_output(f"present.{name}", value)

    def fill(self, length: int) -> None:
        """Hold ``length`` tokens that nobody computed, to time calls with. Raises RequestError if they do not fit.

        Memory that was never written reads faster than a real past, so on CPU numbers are put there.
        """
        if not self.length <= length <= self.capacity:
            raise RequestError(
                f"Cannot fill the cache up to {length} tokens; it holds {self.length} of {self.capacity}."
            )
        if self._device == "cpu":
            for value in self._buffers.values():
                value.numpy()[:, :, self.length : length] = self._filling
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget every token from ``length`` on. Raises RequestError if the cache holds fewer."""
        if not 0 <= length <= self.length:
            raise RequestError(f"Cannot roll the cache back to {length} tokens; it holds {self.length}.")
        self.length = length

    def keep(self, length: int, slots: Sequence[int]) -> None:
        """Keep the first ``length`` tokens and, right behind them, those in ``slots``, which are in ascending order.

        Raises:
            RequestError: a slot holds no token, or the buffers are not in CPU memory.
        """
        if list(slots) != sorted({*slots}) or (slots and not length <= slots[0] <= slots[-1] < self.length):
            raise RequestError(
                f"Cannot keep slots {list(slots)} behind {length} tokens; the cache holds {self.length}."
            )
        if self._device != "cpu":
            raise RequestError("Branches are committed on CPU only; load with exactness='bitwise'.")
        stop = length + len(slots)
        if slots and slots[-1] != stop - 1:
            chosen = list(slots)
            for value in self._buffers.values():
                rows = value.numpy()
                rows[:, :, length:stop] = rows[:, :, chosen]
        self.length = stop
