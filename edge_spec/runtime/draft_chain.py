"""Drafts several tokens in one session call, by a graph that repeats the model's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.runtime.bound_input import BoundInput
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.captured_calls import CapturedCalls
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.shape_grid import ShapeGrid

# Calls of other widths are bound anew: the draft reads the text's last token, or the last two.
_MOST_SHAPES = 4


@dataclass(frozen=True)
class DraftedChain:
    """What one call drafted.

    Attributes:
        tokens: the ids, in order.
        shares: of each, its probability at the temperature; not finite from where the model breaks down (NaN).
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...]


class DraftChain:
    """A session of such a graph, for calls on a cache that is somebody else's.

    Attributes:
        session: of the graph.
        steps: tokens that a call drafts.
    """

    def __init__(
        self,
        onnxruntime: Any,
        session: GraphSession,
        steps: int,
        columns: int,
        settings: DeviceSettings,
        grid: ShapeGrid | None,
        captured: CapturedCalls | None,
    ) -> None:
        """Prepare calls.

        Args:
            onnxruntime: the imported module.
            session: of the graph.
            steps: tokens that a call drafts.
            columns: columns of the draft's logits that stand for ids.
            settings: how the device is used.
            grid: its buckets are what attention is told; ``None`` if it is told the true length.
            captured: gives CUDA graphs, as to the model's other calls; ``None`` if calls run without.
        """
        self.session = session
        self.steps = steps
        self._ort = onnxruntime
        self._columns = columns
        self._settings = settings
        self._grid = grid
        self._captured = captured
        self._calls: dict[tuple[int, int, int, int | None], _Call] = {}
        self._bound: tuple[KVCache, int] | None = None

    def slots(self, rows: int) -> int:
        """How many slots of the cache a call with so many tokens fills; the last token it drafts is read by none."""
        return rows + self.steps - 1

    def draft(
        self,
        cache: KVCache,
        token_ids: Sequence[int],
        noise: Sequence[npt.NDArray[np.float32]] | None,
        inverse_temperature: float,
    ) -> DraftedChain:
        """Read tokens and draft those that follow; the cache must have room, and its length is left to the caller.

        Args:
            cache: holds what precedes the tokens.
            token_ids: at least one.
            noise: float32 [columns] for each step, added to the logits at the temperature; ``None`` for the likeliest.
            inverse_temperature: what the logits are multiplied by.

        Raises:
            Exception: whatever ONNX Runtime raises.
        """
        call = self._call(cache, len(token_ids), 1 if noise is None else self._columns)
        call.fill(token_ids, cache.length, noise, inverse_temperature)
        if self._captured is None:
            self.session.run(call.binding)
        else:
            self._captured.run(self.session, call.binding, call.graph)
        return DraftedChain(*call.drafted())

    def release(self) -> None:
        """Let go of the cache's buffers, unless they stay where they are for good."""
        if not self._settings.resident:
            self._calls.clear()
            self._bound = None

    def _call(self, cache: KVCache, rows: int, noise_columns: int) -> _Call:
        """The buffers of calls of this shape."""
        # Several calls share a cache's buffers, which it replaces as it grows, unless they stay on the device.
        if not self._settings.resident and self._bound != (cache, cache.version):
            self.release()
            self._bound = (cache, cache.version)
        total = None if self._grid is None else self._grid.bucket(cache.length + self.slots(rows))
        key = (cache.buffers, rows, noise_columns, total)
        call = self._calls.get(key)
        if call is None:
            if not self._settings.resident and len(self._calls) == _MOST_SHAPES:
                del self._calls[next(iter(self._calls))]
            graph = None if self._captured is None else self._captured.number(CallShape(rows, 1, total))
            call = self._calls[key] = _Call(
                self._ort, self.session, cache, self.steps, rows, noise_columns, self._settings.name, total, graph
            )
        return call


class _Call:
    """Inputs and outputs of calls with so many tokens and so many columns of noise, bound once."""

    def __init__(
        self,
        onnxruntime: Any,
        session: GraphSession,
        cache: KVCache,
        steps: int,
        rows: int,
        noise_columns: int,
        device: str,
        total: int | None,
        graph: int | None,
    ) -> None:
        self.binding = session.binding()
        self.graph = graph
        self._rows = rows
        self._last = rows + steps - 1
        self._total = total

        def bound(name: str, shape: list[int], dtype: Any, device: str = device) -> BoundInput:
            return BoundInput(onnxruntime, self.binding, name, shape, dtype, device)

        cache.bind(self.binding, steps=steps)
        self._token_ids = bound("input_ids", [1, rows], np.int64)
        self._seqlens_k = bound("seqlens_k", [1], np.int32)
        self._total_length = bound("total_sequence_length", [], np.int32, "cpu")
        self._inverse_temperature = bound("inverse_temperature", [1], np.float32)
        self._noise = bound("noise", [steps, noise_columns], np.float32)
        self._outputs = []
        for name, dtype in (("draft_ids", np.int64), ("draft_shares", np.float32)):
            value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([1, steps], dtype, device)
            self.binding.bind_ortvalue_output(name, value)
            self._outputs.append(value)

    def fill(
        self,
        token_ids: Sequence[int],
        cached: int,
        noise: Sequence[npt.NDArray[np.float32]] | None,
        inverse_temperature: float,
    ) -> None:
        """Write the inputs of a call behind so many cached tokens."""
        self._token_ids.write(token_ids)
        self._seqlens_k.write([cached + self._rows - 1])
        # Of the last step: the kernels only ask it for the most that any row sees.
        self._total_length.write(cached + self._last if self._total is None else self._total)
        self._inverse_temperature.write([inverse_temperature])
        if noise is not None:
            self._noise.write(np.stack(noise))

    def drafted(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens of the last run, and their shares."""
        tokens, shares = (value.numpy()[0].tolist() for value in self._outputs)
        return tuple(tokens), tuple(shares)
