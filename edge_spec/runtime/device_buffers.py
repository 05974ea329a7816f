"""What a session call of one shape reads and writes where inputs and logits lie on the device.

Nothing moves here: the addresses of a call stay the same from the first run on, as a captured graph needs them. What
changes between two calls is some numbers, which are copied over what they replace, and of the logits only what somebody
asks for is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.runtime.bound_input import BoundInput
from edge_spec.runtime.call_buffers import selected_outputs
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.probe_models import ROW_MODEL


class LogitsMemory:
    """Memory on the device that all calls of a model write their logits into, one after the other."""

    def __init__(self, onnxruntime: Any, rows: int, columns: int, device: str) -> None:
        """Allocate it.

        Args:
            onnxruntime: the imported module.
            rows: most rows of a call.
            columns: of the logits, padding included.
            device: where it lies.
        """
        self.rows = rows
        self._columns = columns
        self._device = device
        self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1, max(rows, 1), columns], np.float32, device)

    def bind(self, binding: Any, rows: int) -> Any:
        """Bind the first rows to the output ``logits``, and return them as a value of their own."""
        shape = [1, rows, self._columns]
        binding.bind_output("logits", self._device, 0, np.float32, shape, self._value.data_ptr())
        return binding.get_outputs()[-1]


class RowFetcher:
    """Copies single rows of logits to the host, where a whole call's would be megabytes."""

    def __init__(self, onnxruntime: Any, providers: Sequence[Any], device: str) -> None:
        """Open the session that picks a row on the device.

        Args:
            onnxruntime: the imported module.
            providers: execution providers, the one that does the work first.
            device: where the logits lie.
        """
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(ROW_MODEL, options, providers=list(providers))
        self._index = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.int64, device)

    def fetch(self, logits: Any, row: int) -> npt.NDArray[np.float32]:
        """Return one row.

        Args:
            logits: a value on the device, float32 [1, rows, columns].
            row: which one.

        Returns:
            float32 [columns], memory of its own.
        """
        self._index.update_inplace(np.array([row], np.int64))
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        binding.bind_ortvalue_input("index", self._index)
        fetched = np.empty(logits.shape()[2], np.float32)
        binding.bind_output("row", "cpu", 0, np.float32, [1, 1, len(fetched)], fetched.ctypes.data)
        self._session.run_with_iobinding(binding)
        return fetched


class DeviceCallBuffers:
    """Inputs and output of calls of one shape, on the device.

    Attributes:
        binding: the session's binding, with all of it bound but the KV cache.
        graph: number of the CUDA graph of these buffers; ``None`` if their calls run without.
    """

    def __init__(
        self,
        onnxruntime: Any,
        binding: Any,
        shape: CallShape,
        bias_type: Any,
        memory: LogitsMemory,
        fetcher: RowFetcher,
        columns: int,
        selects: bool,
        device: str,
        graph: int | None = None,
    ) -> None:
        """Allocate the inputs and bind them.

        Args:
            onnxruntime: the imported module.
            binding: a fresh binding of the session.
            shape: of the calls.
            bias_type: numpy type of a tree's bias; ``None`` if the graph takes chains only.
            memory: where the logits go.
            fetcher: fetches one row of them.
            columns: how many of their columns stand for ids.
            selects: whether the graph selects the likeliest of them.
            device: where inputs and logits lie.
            graph: number of the CUDA graph.
        """
        self._shape = shape
        self._columns = columns
        self._fetcher = fetcher
        self.binding = binding
        self.graph = graph
        rows = shape.rows
        self._token_ids = BoundInput(onnxruntime, binding, "input_ids", [1, rows], np.int64, device)
        self._seqlens_k = BoundInput(onnxruntime, binding, "seqlens_k", [1], np.int32, device)
        self._wanted = BoundInput(onnxruntime, binding, "logit_rows", [shape.logit_rows], np.int64, device)
        # The kernels take these from the CPU. Those of a captured graph never see them again: they are the bucket's.
        self._total_length = BoundInput(onnxruntime, binding, "total_sequence_length", [], np.int32, "cpu")
        self._bias: BoundInput | None = None
        if bias_type is None:  # a graph for chains derives positions from the lengths
            self._positions = BoundInput(onnxruntime, binding, "position_ids", [1, rows], np.int64, "cpu")
        else:
            self._positions = BoundInput(onnxruntime, binding, "position_ids", [1, rows], np.int64, device)
            self._bias_padding = BoundInput(onnxruntime, binding, "tree_bias_padding", [2], np.int64, "cpu")
            seen = rows if shape.total is None else shape.total
            self._bias = BoundInput(onnxruntime, binding, "tree_bias", [1, 1, rows, seen], bias_type, device)
        self._logits = memory.bind(binding, shape.logit_rows)
        self._selection: list[Any] = []
        if selects:
            for name, size, dtype in selected_outputs(shape.logit_rows, columns):
                value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(size, dtype, device)
                binding.bind_ortvalue_output(name, value)
                self._selection.append(value)

    @property
    def selection(self) -> tuple[npt.NDArray[Any], ...] | None:
        """Of a graph that selects, int64 ids and float32 logits [logit_rows, likeliest], and float32 log-sum-exp."""
        return tuple(value.numpy()[0] for value in self._selection) if self._selection else None

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """All rows of logits, float32 [logit_rows, columns]."""
        fetched: npt.NDArray[np.float32] = self._logits.numpy()
        return fetched[0, :, : self._columns]

    def row(self, index: int) -> npt.NDArray[np.float32]:
        """One row of logits, float32 [columns], memory of its own."""
        return self._fetcher.fetch(self._logits, index)[: self._columns]

    def fill(
        self, token_ids: Sequence[int], logit_rows: Sequence[int], positions: Sequence[int] | None, cached: int
    ) -> None:
        """Write the inputs of a call, as :meth:`edge_spec.runtime.call_buffers.CallBuffers.fill` does."""
        rows, given = self._shape.rows, len(token_ids)
        total = cached + rows
        self._token_ids.write([*token_ids, *[token_ids[-1]] * (rows - given)])
        self._wanted.write([*logit_rows, *[given - 1] * (self._shape.logit_rows - len(logit_rows))])
        self._seqlens_k.write([total - 1])
        self._total_length.write(total if self._shape.total is None else self._shape.total)
        if self._bias is not None:
            following = range(cached, total)
            self._positions.write(following if positions is None else [*positions, *following[len(positions) :]])

    def fill_mask(self, mask: npt.NDArray[np.bool_] | None, cached: int) -> None:
        """Write who sees whom; a graph for chains only knows.

        Where attention is told a longer total than the true one, it takes the call's rows to sit at the end of that,
        and so hides none of them from another. There the bias says it all, cache included.

        Args:
            mask: bool [tokens, tokens], whether row i sees row j; ``None`` means all rows before it.
            cached: tokens in the cache, which every row sees.
        """
        if self._bias is None:
            return
        rows = self._shape.rows
        sees = np.tri(rows, dtype=np.bool_)
        if mask is not None:
            sees[: len(mask), : len(mask)] &= mask
        bias = np.zeros(self._bias.shape, self._bias.dtype)
        start = 0 if self._shape.total is None else cached
        bias[0, 0, :, start : start + rows][~sees] = -np.inf
        bias[0, 0, :, start + rows :] = -np.inf
        self._bias.write(bias)
        self._bias_padding.write([cached if self._shape.total is None else 0, 0])
