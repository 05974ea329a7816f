"""The calls of one model whose inputs and logits lie on the device: their buffers, kept where CUDA graphs know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec.manifest import ArchitectureRecord
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.captured_calls import CapturedCalls
from edge_spec.runtime.cuda_options import cuda_options
from edge_spec.runtime.device_buffers import DeviceCallBuffers, LogitsMemory, RowFetcher
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.provider import CUDA_PROVIDER

# Shapes of calls without a graph whose buffers are kept.
_MOST_SHAPES = 64

# A session, the number of a cache's buffers, and a shape.
_Key = tuple[int, int, CallShape]


class DeviceCalls:
    """Finds or makes the buffers of a call, and runs it."""

    def __init__(
        self,
        onnxruntime: Any,
        settings: DeviceSettings,
        providers: Sequence[str],
        facts: ArchitectureRecord,
        bias_type: Any,
        columns: int,
        selects: bool,
        widest: int,
        captured: CapturedCalls | None,
    ) -> None:
        """Start without buffers.

        Args:
            onnxruntime: the imported module.
            settings: how the device is used.
            providers: execution providers, the one that does the work first.
            facts: sizes of the model.
            bias_type: numpy type of a tree's bias.
            columns: how many columns of the logits stand for ids.
            selects: whether the graphs select the likeliest of them.
            widest: most rows of calls with CUDA graphs.
            captured: gives them; ``None`` if calls run without.
        """
        self._ort = onnxruntime
        self._settings = settings
        self._captured = captured
        self._bias_type = bias_type
        self._logits_size = facts.logits_size
        self._columns = columns
        self._selects = selects
        named = [(name, cuda_options(None, False)) if name == CUDA_PROVIDER else name for name in providers]
        self._fetcher = RowFetcher(onnxruntime, named, settings.name)
        self._calls: dict[_Key, DeviceCallBuffers] = {}
        # Calls with graphs go on writing where they did when they were captured; the others' memory may grow.
        self._fixed_memory = LogitsMemory(
            onnxruntime, 0 if captured is None else widest, facts.logits_size, settings.name
        )
        self._memory = self._fixed_memory

    def call(self, session: GraphSession, shape: CallShape, cache: KVCache) -> DeviceCallBuffers:
        """The buffers of calls of this shape on this cache, which has room for them."""
        key = (id(session), cache.buffers, shape)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._made(session, shape, cache)
        return call

    def clear(self) -> None:
        """Nothing to forget: caches keep their buffers, and graphs know them."""

    def run(self, session: GraphSession, call: DeviceCallBuffers, cache: KVCache, rows: int) -> None:
        """Run a call whose inputs are filled in. Raises whatever ONNX Runtime raises."""
        if self._captured is None:
            session.run(call.binding)
        else:
            self._captured.run(session, call.binding, call.graph)

    def forget(self, session: GraphSession) -> None:
        """Give back the buffers of a session that is closed."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] != id(session)}

    def _made(self, session: GraphSession, shape: CallShape, cache: KVCache) -> DeviceCallBuffers:
        graph = None if self._captured is None else self._captured.number(shape)
        if graph is None:
            self._make_room(shape.logit_rows)
        binding = session.binding()
        cache.bind(binding)
        return DeviceCallBuffers(
            self._ort,
            binding,
            shape,
            self._bias_type if session.takes_trees else None,
            self._fixed_memory if graph is not None else self._memory,
            self._fetcher,
            self._columns,
            self._selects,
            self._settings.name,
            graph,
        )

    def _make_room(self, logit_rows: int) -> None:
        """Forget calls without graphs where there are too many, or where they write into memory that is too small."""
        free = [key for key, call in self._calls.items() if call.graph is None]
        if logit_rows > self._memory.rows:
            self._memory = LogitsMemory(self._ort, logit_rows, self._logits_size, self._settings.name)
        elif len(free) >= _MOST_SHAPES:
            free = free[:1]
        else:
            return
        for key in free:
            del self._calls[key]
