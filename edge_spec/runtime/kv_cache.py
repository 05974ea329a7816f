"""The KV cache of one text: preallocated buffers that the graph updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.errors import RequestError
from edge_spec.heap import give_back
from edge_spec.manifest import ArchitectureRecord
from edge_spec.runtime.tap_rows import TapRows

# Slots by which buffers grow, and so the fewest of a text: large enough that copying is rare, small enough that little
# lies idle.
LEAST_SLOTS = 256
# Bytes of old buffers that may lie about while a cache moves.
_GIVEN_BACK_AT = 4 << 20
# A long cache grows by this share of itself, so that all copying together stays in proportion to its length.
_GROWTH = 8


def slot_names(layers: int) -> list[str]:
    """What the graphs call the keys and values of each layer: ``0.key``, ``0.value``, ``1.key`` and so on."""
    return [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


class SpareBuffers:
    """Whole sets of buffers that caches of one model have given back, for its next ones.

    A captured CUDA graph knows the addresses of its cache, so a new text begins in the buffers of an old one.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._sets: list[tuple[int, dict[str, Any]]] = []
        self._made = 0

    def take(self) -> tuple[int, dict[str, Any]]:
        """The number of a set and its buffers; of a new set none yet."""
        if self._sets:
            return self._sets.pop()
        self._made += 1
        return self._made, {}

    def keep(self, number: int, buffers: dict[str, Any]) -> None:
        """Take a set back."""
        self._sets.append((number, buffers))


class KVCache:
    """Keys and values of every layer, bound as both past and present.

    Only the first ``length`` slots count, so taking tokens back is a smaller number: no copy, no clearing. Buffers
    grow with the text, and whoever has bound them must bind them again when they have.

    Attributes:
        limit: most slots per layer, one token each.
        capacity: slots there are now.
        length: tokens held.
        version: changes whenever the buffers do.
        taps: the hidden states of tokens that a head has yet to read; ``None`` where none are told.
        buffers: number of the set of buffers, where there are spare ones; else 0.
    """

    def __init__(
        self,
        onnxruntime: Any,
        facts: ArchitectureRecord,
        limit: int,
        dtype: Any,
        device: str,
        spare: SpareBuffers | None = None,
        taps: TapRows | None = None,
    ) -> None:
        """Start an empty cache without buffers.

        Args:
            onnxruntime: the imported module.
            facts: sizes of the model.
            limit: most slots per layer.
            dtype: numpy type of the buffers.
            device: ``"cpu"`` or ``"cuda"``, where the buffers lie.
            spare: where buffers come from and go to that are allocated once, as large as can be.
            taps: memory for hidden states, which follows the tokens of this cache; ``None`` where none are told.
        """
        self.limit = limit
        self.capacity = 0
        self.length = 0
        self.version = 0
        self.buffers = 0
        self.taps = taps
        self._spare = spare
        self._ort = onnxruntime
        self._facts = facts
        self._dtype = dtype
        self._device = device
        # Where nobody computed a token, any number that is not zero will do.
        self._filling = 1 if dtype is np.int8 else 0.01
        self._names = slot_names(facts.layers)
        self._buffers: dict[str, Any] = {}

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers there are."""
        return self.bytes_of(self.capacity)

    def bytes_of(self, slots: int) -> int:
        """Bytes of buffers with so many slots."""
        facts = self._facts
        return len(self._names) * facts.kv_heads * facts.head_size * slots * int(np.dtype(self._dtype).itemsize)

    def slots_for(self, length: int) -> int:
        """How many slots are allocated for so many tokens."""
        if self._device != "cpu" or self._spare is not None:  # what lies on a device cannot be copied without a detour
            return self.limit
        step = max(LEAST_SLOTS, length // _GROWTH // LEAST_SLOTS * LEAST_SLOTS)
        return min(-(-length // step) * step, self.limit)

    def reserve(self, slots: int) -> None:
        """Make room for so many tokens, if there is not enough.

        Raises:
            RequestError: more than the limit.
            Exception: whatever ONNX Runtime raises where the system has no memory left; the cache is then empty.
        """
        if slots <= self.capacity:
            return
        if slots > self.limit:
            raise RequestError(f"{slots} tokens do not fit a cache of {self.limit}.")
        self._resize(self.slots_for(slots))

    def shrink(self, slots: int = 0) -> None:
        """Give back what is not needed for so many tokens; those behind them are forgotten."""
        self.length = min(self.length, slots)
        if self.taps is not None:
            self.taps.rollback(slots)
            if slots == 0:
                self.taps.give_back()
        if slots == 0:
            if self._spare is not None and self.capacity:
                self._spare.keep(self.buffers, self._buffers)
            self.capacity, self._buffers = 0, {}
            self.version += 1
        elif self.slots_for(slots) < self.capacity:
            self._resize(self.slots_for(slots))

    def bind(self, binding: Any, written: bool = True, steps: int = 1) -> None:
        """Bind every buffer to its past input and, if the graph writes into it, its present output in every step."""
        prefixes = [f"{step}." for step in range(steps)] if steps > 1 else [""]
        for name, value in self._buffers.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            for prefix in prefixes if written else ():
                binding.bind_ortvalue_output(f"present.{prefix}{name}", value)

    def write(self, name: str, start: int, rows: npt.NDArray[Any]) -> None:
        """Put rows [kv_heads, rows, head_size] of one layer's ``key`` or ``value`` into the slots from ``start`` on."""
        self._buffers[name].numpy()[0, :, start : start + rows.shape[1]] = rows

    def fill(self, length: int) -> None:
        """Hold ``length`` tokens that nobody computed, to time calls with. Raises RequestError if they do not fit.

        Memory that was never written reads faster than a real past, so on CPU numbers are put there.
        """
        if not self.length <= length <= self.limit:
            raise RequestError(f"Cannot fill the cache up to {length} tokens; it holds {self.length} of {self.limit}.")
        self.reserve(length)
        if self._device == "cpu":
            for value in self._buffers.values():
                value.numpy()[:, :, self.length : length] = self._filling
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget every token from ``length`` on. Raises RequestError if the cache holds fewer."""
        if not 0 <= length <= self.length:
            raise RequestError(f"Cannot roll the cache back to {length} tokens; it holds {self.length}.")
        self.length = length
        if self.taps is not None:
            self.taps.rollback(length)

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
        if self.taps is not None:
            self.taps.keep(length, slots)

    def copy(self, other: KVCache, length: int) -> bool:
        """Hold the first ``length`` tokens of another cache of the same model, in buffers of this one's own.

        Returns:
            Whether it does: what lies on a device is not copied.
        """
        if self._device != "cpu":
            return False
        self.shrink()
        self.reserve(length)
        for name, value in self._buffers.items():
            value.numpy()[:, :, :length] = other._buffers[name].numpy()[:, :, :length]
        self.length = length
        if self.taps is not None and other.taps is not None:
            self.taps.copy(other.taps, length)
        return True

    def _resize(self, capacity: int) -> None:
        """Move the tokens into buffers of another size, one by one: both sizes at once might not fit the memory."""
        shape = [1, self._facts.kv_heads, capacity, self._facts.head_size]
        self.version += 1
        freed = 0
        if self._spare is not None:  # it has never had any, or gave them back
            self.buffers, self._buffers = self._spare.take()
            if self._buffers:
                self.capacity = capacity
                return
        # Some kernels on devices weigh slots that do not count with zero, which would not hide a NaN.
        empty = None if self._device == "cpu" else np.zeros(shape, self._dtype)
        try:
            for name in self._names:
                # ONNX Runtime has to own the memory: a value around a numpy array dangles once the array is freed.
                value = self._ort.OrtValue.ortvalue_from_shape_and_type(shape, self._dtype, self._device)
                if empty is not None:
                    value.update_inplace(empty)
                if self.length:
                    value.numpy()[:, :, : self.length] = self._buffers[name].numpy()[:, :, : self.length]
                self._buffers[name] = value
                freed += self.bytes_of(self.capacity) // len(self._names)
                if freed >= _GIVEN_BACK_AT:  # the old buffers are too small to be used again
                    give_back()
                    freed = 0
        except BaseException:  # a layer's keys and values must never differ in size
            self.shrink()
            raise
        self.capacity = capacity
        give_back()
