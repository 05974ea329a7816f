"""What a session call of one shape reads and writes, bound once: for the exporter's own graphs, and for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.manifest import SELECTED_TOKENS, tap_name

# Binding costs a good part of what a small model's step may cost around the session, so nothing is bound twice. The
# numbers of a call are written through memoryviews, which takes a fraction of what numpy takes for one element.


class CallBuffers:
    """Inputs and output of calls with so many rows and so many rows of logits.

    Attributes:
        binding: the session's binding, with all of it bound but the KV cache.
        rows: tokens of a call, padding included.
        logits: float32 [logit_rows, columns], written by the call.
        selection: int64 ids and float32 logits [logit_rows, likeliest], and float32 log-sum-exp [logit_rows], of a
            graph that selects; ``None`` for others.
        taps: float32 [rows, hidden] of each tap that is kept, written by the call.
    """

    def __init__(
        self,
        onnxruntime: Any,
        binding: Any,
        rows: int,
        bias_type: Any,
        logits: npt.NDArray[np.float32],
        columns: int,
        selects: bool = False,
        taps: Mapping[int, npt.NDArray[Any]] | None = None,
    ) -> None:
        """Allocate the inputs and bind them.

        Args:
            onnxruntime: the imported module.
            binding: a fresh binding of the session.
            rows: tokens of a call.
            bias_type: numpy type of a tree's bias; ``None`` if the graph takes chains only.
            logits: float32 [logit_rows, logits_size], memory for the output, contiguous.
            columns: how many of its columns stand for ids.
            selects: whether the graph selects the likeliest of them.
            taps: memory for the hidden states that are kept [rows, hidden], contiguous, in the compute type.
        """
        self._ort = onnxruntime
        self.binding = binding
        logit_rows, logits_size = logits.shape
        self.rows, self._logit_rows = rows, logit_rows
        self._token_ids = self._bind("input_ids", [1, rows], np.int64)[0].data
        self._positions = self._bind("position_ids", [1, rows], np.int64)[0].data
        self._seqlens_k = self._bind("seqlens_k", [1], np.int32).data
        self._total_length = self._bind("total_sequence_length", [], np.int32).data
        self._wanted = self._bind("logit_rows", [logit_rows], np.int64).data
        self._bias: npt.NDArray[Any] | None = None
        if bias_type is not None:
            self._bias_padding = self._bind("tree_bias_padding", [2], np.int64).data
            self._bias_padding[1] = 0
            self._bias = self._bind("tree_bias", [1, 1, rows, rows], bias_type)[0, 0]
            self._bias[:] = 0
            self._masked = False
        shape = [1, logit_rows, logits_size]
        binding.bind_output("logits", "cpu", 0, np.float32, shape, logits.ctypes.data)
        self.logits = logits[:, :columns]
        self.selection: tuple[npt.NDArray[Any], ...] | None = None
        if selects:
            selected = []
            for name, size, dtype in selected_outputs(logit_rows, columns):
                array = np.empty(size, dtype)
                binding.bind_output(name, "cpu", 0, dtype, size, array.ctypes.data)
                selected.append(array[0])
            self.selection = tuple(selected)
        self.taps = tuple((taps or {}).values())
        for tap, array in (taps or {}).items():
            binding.bind_output(tap_name(tap), "cpu", 0, array.dtype.type, [1, *array.shape], array.ctypes.data)

    def row(self, index: int) -> npt.NDArray[np.float32]:
        """One row of logits, float32 [columns]."""
        row: npt.NDArray[np.float32] = self.logits[index]
        return row

    def fill(
        self, token_ids: Sequence[int], logit_rows: Sequence[int], positions: Sequence[int] | None, cached: int
    ) -> None:
        """Write the inputs of a call; rows that are not given repeat the last one.

        Args:
            token_ids: at least one token.
            logit_rows: whose logits are wanted.
            positions: a position for each token; ``None`` means they follow the cache.
            cached: tokens in the cache.
        """
        _write(self._token_ids, token_ids, self.rows, token_ids[-1])
        total = cached + self.rows
        for row, position in enumerate(range(cached, total)):
            self._positions[row] = position
        if positions is not None:
            for row, position in enumerate(positions):
                self._positions[row] = position
        _write(self._wanted, logit_rows, self._logit_rows, len(token_ids) - 1)
        self._seqlens_k[0] = total - 1
        self._total_length[()] = total

    def fill_mask(self, mask: npt.NDArray[np.bool_] | None, cached: int) -> None:
        """Write who sees whom; a graph for chains only knows.

        Args:
            mask: bool [tokens, tokens], whether row i sees row j; ``None`` means all rows before it.
            cached: tokens in the cache, which every row sees.
        """
        if self._bias is None:
            return
        self._bias_padding[0] = cached
        if self._masked:
            self._bias[:] = 0
            self._masked = False
        if mask is not None:
            self._bias[: len(mask), : len(mask)][~mask] = -np.inf
            self._masked = True

    def _bind(self, name: str, shape: list[int], dtype: Any) -> npt.NDArray[Any]:
        return _bound(self._ort, self.binding, name, shape, dtype)


class ChainCallBuffers:
    """The same for a graph by way of optimum, which takes no positions and no mask: it knows the length of its past.

    Attributes:
        binding: the session's binding, with all of it bound but the KV cache and the new rows.
        rows: tokens of a call, padding included.
        logits: float32 [logit_rows, columns], written by the call.
    """

    selection: None = None  # these graphs do not
    taps: tuple[()] = ()

    def __init__(
        self, onnxruntime: Any, binding: Any, rows: int, logits: npt.NDArray[np.float32], columns: int
    ) -> None:
        """Allocate the inputs and bind them; arguments as of :class:`CallBuffers`."""
        self.binding = binding
        self.rows = rows
        self._logit_rows, logits_size = logits.shape
        self._token_ids = _bound(onnxruntime, binding, "input_ids", [1, rows], np.int64)[0].data
        self._past_length = _bound(onnxruntime, binding, "past_length", [1], np.int64).data
        self._wanted = _bound(onnxruntime, binding, "logit_rows", [self._logit_rows], np.int64).data
        shape = [1, self._logit_rows, logits_size]
        binding.bind_output("logits", "cpu", 0, np.float32, shape, logits.ctypes.data)
        self.logits = logits[:, :columns]

    def fill(
        self, token_ids: Sequence[int], logit_rows: Sequence[int], positions: Sequence[int] | None, cached: int
    ) -> None:
        """Write the inputs of a call, as :meth:`CallBuffers.fill` does; positions follow the cache."""
        assert positions is None  # the model refuses them
        _write(self._token_ids, token_ids, self.rows, token_ids[-1])
        _write(self._wanted, logit_rows, self._logit_rows, len(token_ids) - 1)
        self._past_length[0] = cached

    def fill_mask(self, mask: npt.NDArray[np.bool_] | None, cached: int) -> None:
        """Nothing to write: the graph takes chains only."""


def selected_outputs(logit_rows: int, columns: int) -> Iterator[tuple[str, list[int], Any]]:
    """The outputs of a graph that selects: name, shape and numpy type of ids, logits and log-sum-exp.

    Args:
        logit_rows: rows of logits of a call.
        columns: how many of their columns stand for ids.
    """
    most = min(SELECTED_TOKENS, columns)
    yield "top_ids", [1, logit_rows, most], np.int64
    yield "top_logits", [1, logit_rows, most], np.float32
    yield "log_sum_exp", [1, logit_rows], np.float32


def _bound(onnxruntime: Any, binding: Any, name: str, shape: list[int], dtype: Any) -> npt.NDArray[Any]:
    """Memory that is bound to an input. ONNX Runtime owns it, and the binding keeps it."""
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype)
    binding.bind_ortvalue_input(name, value)
    array: npt.NDArray[Any] = value.numpy()
    return array


def _write(buffer: Any, values: Sequence[int], size: int, padding: int) -> None:
    for index, value in enumerate(values):
        buffer[index] = value
    for index in range(len(values), size):
        buffer[index] = padding
