"""The target with several texts in its memory: it reads a prompt into a slot, and writes all slots a token further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.bundle import Bundle
from edge_spec.distill.batch_graph import batch_graph
from edge_spec.distill.tapped_text import TOP_TOKENS
from edge_spec.errors import RequestError
from edge_spec.onnx_runtime import import_onnxruntime

# Rows of a call that reads a prompt, as the runtime reads it.
_READ_ROWS = 64
_LARGEST_HALF = 65504.0
_WEIGHT_FOLDER = "session.model_external_initializers_file_folder_path"
_MATRICES = ("attention", "mlp_up", "mlp_down", "lm_head")


@dataclass(frozen=True)
class TappedRows:
    """What the target computed at some rows.

    Attributes:
        taps: float16 [rows, taps * D], in the checkpoint's own basis.
        top_ids: int32 [logit rows, N], the likeliest first.
        top_logits: float32 [logit rows, N].
        top_log_probs: float16 [logit rows, N].
    """

    taps: npt.NDArray[np.float16]
    top_ids: npt.NDArray[np.int32]
    top_logits: npt.NDArray[np.float32]
    top_log_probs: npt.NDArray[np.float16]


class TargetBatch:
    """A target's session over slots, each with a KV cache of its own.

    Attributes:
        slots: how many texts there can be.
        capacity: most tokens of a text.
        taps: layers after which the residual stream is taken.
        lengths: int64 [slots], tokens that each slot holds; 0 for a free one.
        top_tokens: likeliest tokens of each row.
        hidden_size: elements of a tap.
    """

    def __init__(
        self, bundle: Bundle, taps: Sequence[int], slots: int, capacity: int, threads: int | None = None
    ) -> None:
        """Load the target of a bundle.

        Args:
            bundle: a validated one for the CPU.
            taps: layers from 1 to the last; none, if no hidden states are wanted.
            slots: texts at a time.
            capacity: most tokens of a text.
            threads: of the CPU; ``None`` for ONNX Runtime's choice.

        Raises:
            RequestError: the bundle has no graph that can be made over, or a tap is no layer of it.
        """
        record = bundle.manifest.target
        facts = record.architecture
        graph = next((graph for graph in record.graphs if graph.kv == "float32" and graph.via == "native"), None)
        if graph is None or bundle.manifest.device != "cpu":
            raise RequestError(
                f"{bundle.path} has no native graph for the CPU with a float32 cache; export the target for the CPU."
            )
        if not all(1 <= tap <= facts.layers for tap in taps):
            raise RequestError(f"taps are {list(taps)}, expected layers from 1 to {facts.layers}.")
        self.slots, self.capacity, self.taps = slots, capacity, tuple(taps)
        self.hidden_size = facts.hidden_size
        usable = bundle.manifest.usable_columns(record)
        self.top_tokens = min(TOP_TOKENS, usable)
        self.lengths = np.zeros(slots, np.int64)
        path = bundle.path / graph.path
        formats = [record.recipe.get(name) for name in _MATRICES]
        model = batch_graph(path, taps, facts.layers, facts.hidden_size, usable, facts.sliding_window, formats)
        self._ort: Any = import_onnxruntime()
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(_WEIGHT_FOLDER, str(path.parent))
        # This goes on for hours beside other work: threads that wait must not keep others from computing.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        serialized = model.SerializeToString()
        self._session = self._ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        shape = (slots, facts.kv_heads, capacity, facts.head_size)
        self._caches = {
            f"{layer}.{part}": np.zeros(shape, np.float32) for layer in range(facts.layers) for part in ("key", "value")
        }
        self._step = _Call(self, range(slots), 1, [0])

    def read(self, slot: int, token_ids: Sequence[int], wanted: int = 1) -> TappedRows:
        """Read a text into a slot, whatever was there.

        Args:
            slot: where to.
            token_ids: at most ``capacity``.
            wanted: how many of the last rows' likeliest tokens are wanted, at least one.
        """
        first = len(token_ids) - wanted
        self.lengths[slot] = 0
        parts = []
        for start in range(0, len(token_ids), _READ_ROWS):
            ids = token_ids[start : start + _READ_ROWS]
            # A call computes the logits of one row at least.
            rows = [row for row in range(len(ids)) if start + row >= first]
            call = _Call(self, range(slot, slot + 1), len(ids), rows or [0])
            part = call.run(np.array([ids], np.int64))
            self.lengths[slot] += len(ids)
            parts.append((part, len(rows)))
        return TappedRows(
            np.concatenate([part.taps for part, _ in parts]),
            np.concatenate([part.top_ids[:count] for part, count in parts]),
            np.concatenate([part.top_logits[:count] for part, count in parts]),
            np.concatenate([part.top_log_probs[:count] for part, count in parts]),
        )

    def advance(self, token_ids: npt.NDArray[np.int64]) -> TappedRows:
        """Read one more token into each slot that holds a text.

        Args:
            token_ids: int64 [slots]; those of free slots are of no importance.

        Returns:
            A row for each slot; those of free ones mean nothing.
        """
        rows = self._step.run(token_ids[:, None])
        self.lengths += self.lengths > 0
        return rows

    def free(self, slot: int) -> None:
        """Forget the text of a slot."""
        self.lengths[slot] = 0

    def tapped(
        self,
        hidden: npt.NDArray[np.float32],
        top_ids: npt.NDArray[np.int64],
        top_logits: npt.NDArray[np.float32],
        log_sum_exp: npt.NDArray[np.float32],
    ) -> TappedRows:
        """Make rows of what a call has written: hidden [rows, taps * D], the others [batch, logit rows, ...]."""
        taps = np.clip(hidden, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)
        logits = top_logits.reshape(-1, self.top_tokens)
        log_probs = np.maximum(logits - log_sum_exp.reshape(-1, 1), -_LARGEST_HALF).astype(np.float16)
        return TappedRows(taps, top_ids.reshape(-1, self.top_tokens).astype(np.int32), logits.copy(), log_probs)

    def bind(self, call: _Call, slots: range) -> Any:
        """A binding of a call's arrays and of the caches of some slots that follow one another."""
        binding = self._session.io_binding()
        for name, array in call.inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in call.outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, cache in self._caches.items():
            part = cache[slots.start : slots.stop]
            for prefix, bind in (("past_key_values.", binding.bind_input), ("present.", binding.bind_output)):
                bind(prefix + name, "cpu", 0, part.dtype, part.shape, part.ctypes.data)
        return binding

    def run_bound(self, binding: Any) -> None:
        """Run a call that is bound."""
        self._session.run_with_iobinding(binding)


class _Call:
    """The arrays of a call with so many rows of some slots, bound once."""

    def __init__(self, target: TargetBatch, slots: range, rows: int, logit_rows: Sequence[int]) -> None:
        batch, wanted, top = len(slots), len(logit_rows), target.top_tokens
        self._target, self._slots, self._rows = target, slots, rows
        self.inputs: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.zeros((batch, rows), np.int64),
            "position_ids": np.zeros((batch, rows), np.int64),
            "seqlens_k": np.zeros(batch, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
            "logit_rows": np.array(logit_rows, np.int64),
        }
        self._hidden = [np.empty((batch, rows, target.hidden_size), np.float32) for _ in target.taps]
        self._top = (
            np.empty((batch, wanted, top), np.int64),
            np.empty((batch, wanted, top), np.float32),
            np.empty((batch, wanted), np.float32),
        )
        self.outputs: dict[str, npt.NDArray[Any]] = {
            **{f"hidden.{tap}": hidden for tap, hidden in zip(target.taps, self._hidden, strict=True)},
            **dict(zip(("top_ids", "top_logits", "log_sum_exp"), self._top, strict=True)),
        }
        self._binding = target.bind(self, slots)

    def run(self, token_ids: npt.NDArray[np.int64]) -> TappedRows:
        """Read these tokens, int64 [batch, rows], behind what the slots hold."""
        lengths = self._target.lengths[self._slots.start : self._slots.stop]
        self.inputs["input_ids"][:] = token_ids
        self.inputs["position_ids"][:] = lengths[:, None] + np.arange(self._rows)
        self.inputs["seqlens_k"][:] = lengths + self._rows - 1
        self.inputs["total_sequence_length"][()] = lengths.max() + self._rows
        self._target.run_bound(self._binding)
        none = np.empty((lengths.size, self._rows, 0), np.float32)
        hidden = np.concatenate([none, *self._hidden], axis=2)
        return self._target.tapped(hidden.reshape(lengths.size * self._rows, hidden.shape[2]), *self._top)
