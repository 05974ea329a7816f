"""Drafts several tokens in one session call, by a graph that repeats the model's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.runtime.kv_cache import KVCache

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
        session: ONNX Runtime's.
        steps: tokens that a call drafts.
    """

    def __init__(self, onnxruntime: Any, session: Any, steps: int, columns: int) -> None:
        """Prepare calls.

        Args:
            onnxruntime: the imported module.
            session: of the graph.
            steps: tokens that a call drafts.
            columns: columns of the draft's logits that stand for ids.
        """
        self.session = session
        self.steps = steps
        self._ort = onnxruntime
        self._columns = columns
        self._calls: dict[tuple[int, int], _Call] = {}
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
        # Several calls share a cache's buffers, which it replaces as it grows.
        if self._bound != (cache, cache.version):
            self.release()
            self._bound = (cache, cache.version)
        shape = (len(token_ids), 1 if noise is None else self._columns)
        call = self._calls.get(shape)
        if call is None:
            if len(self._calls) == _MOST_SHAPES:
                del self._calls[next(iter(self._calls))]
            call = self._calls[shape] = _Call(self._ort, self.session, cache, self.steps, *shape)
        call.fill(token_ids, cache.length, noise, inverse_temperature)
        self.session.run_with_iobinding(call.binding)
        return DraftedChain(tuple(call.tokens[0].tolist()), tuple(call.shares[0].tolist()))

    def release(self) -> None:
        """Let go of the cache's buffers."""
        self._calls.clear()
        self._bound = None


class _Call:
    """Inputs and outputs of calls with so many tokens and so many columns of noise, bound once."""

    def __init__(
        self, onnxruntime: Any, session: Any, cache: KVCache, steps: int, rows: int, noise_columns: int
    ) -> None:
        self._ort = onnxruntime
        self.binding = session.io_binding()
        self._rows = rows
        self._last = rows + steps - 1
        cache.bind(self.binding, steps=steps)
        self._token_ids = self._input("input_ids", [1, rows], np.int64)
        self._seqlens_k = self._input("seqlens_k", [1], np.int32)
        self._total_length = self._input("total_sequence_length", [], np.int32)
        self._inverse_temperature = self._input("inverse_temperature", [1], np.float32)
        self._noise = self._input("noise", [steps, noise_columns], np.float32)
        self._noise[:] = 0
        self.tokens, self.shares = np.zeros((1, steps), np.int64), np.zeros((1, steps), np.float32)
        for name, array in (("draft_ids", self.tokens), ("draft_shares", self.shares)):
            self.binding.bind_output(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)

    def fill(
        self,
        token_ids: Sequence[int],
        cached: int,
        noise: Sequence[npt.NDArray[np.float32]] | None,
        inverse_temperature: float,
    ) -> None:
        """Write the inputs of a call behind so many cached tokens."""
        self._token_ids[0] = token_ids
        self._seqlens_k[0] = cached + self._rows - 1
        # Of the last step: the kernels only ask it for the most that any row sees.
        self._total_length[()] = cached + self._last
        self._inverse_temperature[0] = inverse_temperature
        for step, row in enumerate(noise or ()):
            self._noise[step] = row

    def _input(self, name: str, shape: list[int], dtype: Any) -> npt.NDArray[Any]:
        """Memory that is bound to an input. ONNX Runtime owns it, and the binding keeps it."""
        value = self._ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype)
        self.binding.bind_ortvalue_input(name, value)
        array: npt.NDArray[Any] = value.numpy()
        return array
