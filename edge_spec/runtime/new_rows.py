"""What a graph by way of optimum gives besides logits: keys and values of a call's own rows, yet to join the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.manifest import ArchitectureRecord
from edge_spec.runtime.kv_cache import KVCache, slot_names


class NewRows:
    """Memory that every call writes its rows into, from where they are copied behind the past.

    Attributes:
        most: rows there is room for.
    """

    def __init__(self, facts: ArchitectureRecord, most: int) -> None:
        """Make room for calls of at most so many rows of a model."""
        self.most = most
        self._heads, self._head_size = facts.kv_heads, facts.head_size
        names = slot_names(facts.layers)
        memory = np.empty((len(names), facts.kv_heads * most * facts.head_size), np.float32)
        self._memory = dict(zip(names, memory, strict=True))

    def bind(self, binding: Any, rows: int) -> None:
        """Bind the outputs of calls with so many rows. The memory must live as long as the binding is used."""
        shape = [1, self._heads, rows, self._head_size]
        for name, memory in self._memory.items():
            binding.bind_output(f"new.{name}", "cpu", 0, np.float32, shape, memory.ctypes.data)

    def append_to(self, cache: KVCache, start: int, rows: int, kept: int) -> None:
        """Copy the first ``kept`` of a call's ``rows`` into the cache's slots from ``start`` on."""
        for name, memory in self._memory.items():
            cache.write(name, start, self._shaped(memory, rows)[:, :kept])

    def _shaped(self, memory: npt.NDArray[np.float32], rows: int) -> npt.NDArray[np.float32]:
        return memory[: self._heads * rows * self._head_size].reshape(self._heads, rows, self._head_size)
