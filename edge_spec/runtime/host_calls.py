"""The calls of one model whose inputs and logits lie in CPU memory: their buffers, bound once for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.manifest import ArchitectureRecord
from edge_spec.runtime.call_buffers import CallBuffers, ChainCallBuffers
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.new_rows import NewRows

# Shapes of calls whose buffers are kept. Each takes some kilobytes for its reference to every layer's cache.
_MOST_SHAPES = 64

HostBuffers = CallBuffers | ChainCallBuffers


class HostCalls:
    """Finds or makes the buffers of a call, and runs it."""

    def __init__(
        self,
        onnxruntime: Any,
        facts: ArchitectureRecord,
        bias_type: Any,
        columns: int,
        selects: bool,
        reads_only: bool,
        rows: int,
        taps: Sequence[int] = (),
    ) -> None:
        """Start without buffers.

        Args:
            onnxruntime: the imported module.
            facts: sizes of the model.
            bias_type: numpy type of a tree's bias.
            columns: how many columns of the logits stand for ids.
            selects: whether the graphs select the likeliest of them.
            reads_only: whether the graph only reads the cache, as those by way of optimum do.
            rows: of usual wide calls.
            taps: which hidden states are kept.
        """
        self._ort = onnxruntime
        self._facts = facts
        self._bias_type = bias_type
        self._columns = columns
        self._selects = selects
        self._new_rows = NewRows(facts, rows) if reads_only else None
        self._calls: dict[tuple[int, int], HostBuffers] = {}
        self._bound = -1  # version of the cache's buffers that these calls are bound to
        self._logits = np.empty((0, facts.logits_size), np.float32)
        self._taps = {tap: np.empty((0, facts.hidden_size), bias_type) for tap in taps}
        self._tap_rows = 0

    def clear(self) -> None:
        """Forget all calls: they hold the buffers of the cache."""
        self._calls.clear()

    def forget(self, session: GraphSession) -> None:
        """Nothing to forget of a session that is closed: in CPU memory one does it all."""

    def call(self, session: GraphSession, shape: CallShape, cache: KVCache) -> HostBuffers:
        """The buffers of calls of this shape on this cache, which has room for them."""
        if self._bound != cache.version:
            self._calls.clear()
            self._bound = cache.version
        key = shape.rows, shape.logit_rows
        call = self._calls.get(key)
        if call is None:
            if shape.logit_rows > len(self._logits):  # all calls write their logits into the same memory
                self._calls.clear()
                self._logits = np.empty((shape.logit_rows, self._facts.logits_size), np.float32)
            elif len(self._calls) == _MOST_SHAPES:
                del self._calls[next(iter(self._calls))]
            if shape.rows > self._tap_rows and self._taps:  # likewise
                self._calls.clear()
                self._tap_rows = shape.rows
                hidden = self._facts.hidden_size
                self._taps = {tap: np.empty((shape.rows, hidden), self._bias_type) for tap in self._taps}
            call = self._calls[key] = self._made(session, shape, cache)
        return call

    def run(self, session: GraphSession, call: HostBuffers, cache: KVCache, rows: int) -> None:
        """Run a call whose inputs are filled in, ``rows`` of which are tokens. Raises whatever ONNX Runtime raises."""
        session.run(call.binding)
        if self._new_rows is not None:
            self._new_rows.append_to(cache, cache.length, call.rows, rows)

    def _made(self, session: GraphSession, shape: CallShape, cache: KVCache) -> HostBuffers:
        binding = session.binding()
        logits: npt.NDArray[np.float32] = self._logits[: shape.logit_rows]
        if self._new_rows is None:
            cache.bind(binding)
            bias_type = self._bias_type if session.takes_trees else None
            taps = {tap: memory[: shape.rows] for tap, memory in self._taps.items()}
            return CallBuffers(self._ort, binding, shape.rows, bias_type, logits, self._columns, self._selects, taps)
        if shape.rows > self._new_rows.most:
            self._calls.clear()  # they write into the memory that is too small
            self._new_rows = NewRows(self._facts, shape.rows)
        cache.bind(binding, written=False)
        self._new_rows.bind(binding, shape.rows)
        return ChainCallBuffers(self._ort, binding, shape.rows, logits, self._columns)
