"""The calls of a recurrent head: their inputs and outputs in CPU memory, bound once for each shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.kv_cache import KVCache

# Shapes of calls that are kept. A head reads as many rows as a round of the target has brought, or one of its own.
_MOST_SHAPES = 32


@dataclass(frozen=True)
class HeadShape:
    """Rows of a call.

    Attributes:
        tap_rows: those with hidden states of the target, which come first.
        feature_rows: those with what the head itself has said of a token.
        logit_rows: those whose logits are wanted.
    """

    tap_rows: int
    feature_rows: int
    logit_rows: int


class HeadCall:
    """A call of one shape.

    Attributes:
        binding: the session's binding.
        logits: float32 [logit_rows, columns of the graph], written by the call.
        features: [logit_rows, hidden] in the compute type, written by the call.
    """

    def __init__(
        self,
        binding: Any,
        shape: HeadShape,
        inputs: dict[str, NDArray[Any]],
        logits: NDArray[np.float32],
        features: NDArray[Any],
        device: str,
    ) -> None:
        """Bind inputs and outputs.

        Args:
            binding: a fresh binding of the session, with the cache bound.
            shape: of the call.
            inputs: memory for ``taps`` [tap_rows, width] and ``features`` [feature_rows, hidden].
            logits: memory for that output.
            features: likewise.
            device: where the kernels read; ``"cpu"`` or ``"cuda"``.
        """
        self.binding = binding
        self.logits = logits
        self.features = features
        self._on_cpu = device == "cpu"
        self._rows = rows = shape.tap_rows + shape.feature_rows
        self._inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((1, rows), np.int64),
            "seqlens_k": np.zeros(1, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
            "logit_rows": np.zeros(shape.logit_rows, np.int64),
            **{name: memory[None] for name, memory in inputs.items()},
        }
        if self._on_cpu:  # ONNX Runtime copies to a device what is bound, and so it is bound there in every call
            for name, array in self._inputs.items():
                binding.bind_input(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
        for name, array in (("logits", logits), ("feature", features)):
            binding.bind_output(name, "cpu", 0, array.dtype.type, [1, *array.shape], array.ctypes.data)

    def fill(
        self,
        token_ids: Any,
        taps: NDArray[np.float32] | None,
        features: NDArray[Any] | None,
        logit_rows: Any,
        cached: int,
    ) -> None:
        """Write the inputs of a call behind so many cached rows; see :meth:`HeadModel.forward`."""
        inputs = self._inputs
        inputs["input_ids"][0] = token_ids
        inputs["logit_rows"][:] = logit_rows
        if taps is not None:
            inputs["taps"][0] = taps
        if features is not None:
            inputs["features"][0] = features
        inputs["seqlens_k"][0] = cached + self._rows - 1
        inputs["total_sequence_length"][()] = cached + self._rows
        if not self._on_cpu:
            for name, array in inputs.items():
                self.binding.bind_cpu_input(name, array)


class HeadCalls:
    """Finds or makes the buffers of a call. All calls write into the same memory."""

    def __init__(
        self, session: GraphSession, width: int, hidden: int, columns: int, dtype: Any, device: str, most: int
    ) -> None:
        """Start without buffers.

        Args:
            session: of the head's graph.
            width: elements of a row of taps.
            hidden: elements of a feature.
            columns: of the logits, padding included.
            dtype: numpy type that the graph computes in.
            device: where its kernels read.
            most: most rows of a call.
        """
        self._session = session
        self._device = device
        self._columns = columns
        self._taps = np.zeros((most, width), dtype)
        self._given = np.zeros((most, hidden), dtype)
        self._features = np.zeros((1, hidden), dtype)
        self._logits = np.zeros((1, columns), np.float32)
        self._calls: dict[HeadShape, HeadCall] = {}
        self._bound: tuple[KVCache, int] | None = None

    def clear(self) -> None:
        """Forget all calls: they hold the buffers of the cache."""
        self._calls.clear()
        self._bound = None

    def call(self, shape: HeadShape, cache: KVCache) -> HeadCall:
        """The buffers of calls of this shape on this cache, which has room for them."""
        if self._bound != (cache, cache.version):
            self.clear()
            self._bound = (cache, cache.version)
        call = self._calls.get(shape)
        if call is None:
            wanted = shape.logit_rows
            if wanted > len(self._logits):
                self._calls.clear()
                self._logits = np.zeros((wanted, self._columns), np.float32)
                self._features = np.zeros((wanted, self._features.shape[1]), self._features.dtype)
            elif len(self._calls) == _MOST_SHAPES:
                del self._calls[next(iter(self._calls))]
            binding = self._session.binding()
            cache.bind(binding)
            inputs = {"taps": self._taps[: shape.tap_rows], "features": self._given[: shape.feature_rows]}
            logits, features = self._logits[:wanted], self._features[:wanted]
            call = self._calls[shape] = HeadCall(binding, shape, inputs, logits, features, self._device)
        return call

    def run(self, call: HeadCall) -> None:
        """Run a call whose inputs are filled in. Raises whatever ONNX Runtime raises."""
        self._session.run(call.binding)
