"""One model of the pair in an ONNX Runtime session: rows of tokens in, logits out, KV cache kept in place."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError, DeviceMemoryError, ProviderError, RequestError
from edge_spec.manifest import CacheType, ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.captured_calls import CapturedCalls
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.device_calls import DeviceCalls
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.draft_chain import DraftChain, DraftedChain
from edge_spec.runtime.graph_session import GraphSession, call_failure, said
from edge_spec.runtime.host_calls import HostCalls
from edge_spec.runtime.kv_cache import KVCache, SpareBuffers
from edge_spec.runtime.logit_rows import LogitRows, SelectedRows
from edge_spec.runtime.model_sessions import choose_graph, open_sessions
from edge_spec.runtime.shape_choice import ShapeChoice, rows_of_one_block
from edge_spec.runtime.shape_grid import ShapeGrid
from edge_spec.runtime.tap_rows import MOST_TAP_ROWS, TapRows

# Rows of one prefill call: wide enough to use the matrix kernels well, small enough to bound the workspace.
PREFILL_ROWS = 64


class Model:
    """A graph, and the cache of the text that it works on.

    ``forward`` never reads or writes beyond what it is told: tokens are appended to the cache, and whoever wants
    them gone again calls ``cache.rollback``.

    Attributes:
        context: most tokens of a text.
        positions: how many positions the rotary table has for sure.
        columns: how many columns of the logits stand for ids.
        cache: that of the current text.
        keeps_taps: whether hidden states are kept of calls, if there are any; without, whoever reads them begins anew.
    """

    def __init__(
        self,
        bundle: Bundle,
        record: ModelRecord,
        providers: Sequence[str],
        context: int,
        exact_rows: bool,
        threads: int | None = None,
        fixed_rows: int | None = None,
        kv: CacheType | None = None,
        settings: DeviceSettings | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """Load a model of a bundle.

        Args:
            bundle: the validated bundle.
            record: which of its models.
            providers: execution providers, the one that does the work first.
            context: most tokens of a text.
            exact_rows: whether a row must have the same bits whatever rows travel with it, which a target owes so
                that speculation does not show. Calls are padded for it: kernels for one row round differently from
                those for several. On CUDA there is no such padding, and ``fixed_rows`` is the way.
            threads: threads of the session, ``None`` for ONNX Runtime's choice.
            fixed_rows: give every session call exactly this many rows, by padding and by splitting. The dear way to
                bitwise exactness, for kernels that round differently for every width.
            kv: type of the KV cache, ``None`` for the model's own.
            settings: how the device is used; ``None`` for all that works there.
            taps: hidden states that are kept of every token (``cache.taps``), after how many layers.

        Raises:
            BundleError: the graph does not tell those hidden states, one is not what the exporter writes, ONNX Runtime
                refuses it, or the bundle has none with such a cache.
            DeviceMemoryError: the device has no memory for it.
            ProviderError: this ONNX Runtime takes no int8 cache.
        """
        self._process = os.getpid()
        self._session: GraphSession | None = None
        self._trees: GraphSession | None = None
        self._drafting: dict[int, DraftChain] = {}
        self._ort = import_onnxruntime()
        self._settings = settings_for(providers) if settings is None else settings
        self.columns = bundle.manifest.usable_columns(record)
        graph = choose_graph(bundle, record, kv)
        if missing := sorted(set(taps) - set(graph.taps)):
            raise BundleError(
                f"{bundle.path / graph.path} does not tell the hidden states behind {missing} layers, only behind "
                f"{list(graph.taps)}."
            )
        if taps:  # hidden states are read on the host, in every call
            self._settings = replace(self._settings, resident=False, captures=False, tree_graph=False)
        sessions = open_sessions(self._ort, bundle, record, graph, providers, threads, self._settings)
        self._session, self._trees = sessions.chains, sessions.trees
        self._embedding = sessions.embedding
        if sessions.graphs_refused is not None:
            self._settings = self._settings.without_graphs(sessions.graphs_refused)
        bias_type: Any = np.float16 if graph.kv == "float16" else np.float32
        self.context = context
        self.positions = record.architecture.context_length
        self._architecture = record.architecture
        self._cache_type: Any = np.dtype(graph.kv).type
        # Padding rows are written behind the last token, so the cache may grow that much longer than the text.
        self._slots = context + (fixed_rows or 1)
        self._spare = SpareBuffers() if self._settings.resident else None
        self.keeps_taps = bool(taps)
        self._tap_width = len(taps) * self._architecture.hidden_size
        self.cache = self.new_cache()
        self._grid = ShapeGrid.of_device(self._settings, self._slots, fixed_rows)
        self._shapes = ShapeChoice(
            # Elsewhere kernels round differently at each width, and one padding row would help nobody.
            exact_rows and self._settings.name == "cpu",
            fixed_rows,
            rows_of_one_block(record.recipe),
            self._grid,
            int(graph.selects),  # not every provider takes no rows at all where it selects
        )
        self._captured = None if self._grid is None or not self._settings.captures else CapturedCalls()
        self._calls: HostCalls | DeviceCalls
        if self._settings.resident:
            self._calls = DeviceCalls(
                self._ort,
                self._settings,
                providers,
                self._architecture,
                bias_type,
                self.columns,
                graph.selects,
                0 if self._grid is None else self._grid.widths[-1],
                self._captured,
            )
        else:
            reads_only = graph.via == "optimum"
            self._calls = HostCalls(
                self._ort, self._architecture, bias_type, self.columns, graph.selects, reads_only, PREFILL_ROWS, taps
            )
        for steps, session in sessions.drafting.items():
            self._drafting[steps] = DraftChain(
                self._ort, session, steps, self.columns, self._settings, self._grid, self._captured
            )

    def __del__(self) -> None:
        """In a forked process keep the session for ever: its threads did not come along, and its end waits for them."""
        if os.getpid() != self._process:
            for session in self._sessions():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

    @property
    def fixed_rows(self) -> int | None:
        """Rows of every session call; ``None`` where a call has as many as it is given."""
        return self._shapes.fixed_rows

    @property
    def takes_trees(self) -> bool:
        """Whether a call may have positions and a mask."""
        return self._trees is not None

    @property
    def trees_apart(self) -> bool:
        """Whether those run in another graph than other calls, with other kernels."""
        return self._trees not in (None, self._session)

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """How many tokens one call can draft, the fewest first; none where each needs a call of its own."""
        return tuple(sorted(self._drafting))

    @property
    def slides(self) -> bool:
        """Whether tokens can be dropped from the middle of the cache while others go on behind them."""
        return self._trees is self._session and self.moves_slots

    @property
    def moves_slots(self) -> bool:
        """Whether tokens of the cache can be moved to other slots, as branches are when they are committed."""
        return not self._settings.resident and self._settings.name == "cpu"

    @property
    def eager_reason(self) -> str | None:
        """Why calls run without CUDA graphs, or some of them; ``None`` if there is nothing to say."""
        return self._settings.eager_reason if self._captured is None else self._captured.reason

    @property
    def widest_tree(self) -> int:
        """Most draft tokens of one call that travel with the text's last token."""
        return (self.fixed_rows or PREFILL_ROWS) - 1

    def new_cache(self) -> KVCache:
        """An empty cache for another text, see :meth:`use`."""
        taps = TapRows(self._tap_width, MOST_TAP_ROWS) if self._tap_width else None
        device = self._settings.name
        return KVCache(self._ort, self._architecture, self._slots, self._cache_type, device, self._spare, taps)

    def use(self, cache: KVCache) -> None:
        """Work on the text of another cache from now on."""
        if cache is not self.cache:
            self._release()
            self.cache = cache

    def shrink(self, cache: KVCache, slots: int = 0) -> None:
        """Give back what a cache of this model does not need for so many tokens; those behind them are forgotten."""
        if cache is self.cache:
            self._release()
        cache.shrink(slots)

    def forward(
        self,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        positions: Sequence[int] | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> LogitRows:
        """Append tokens to the cache and return the logits of chosen rows.

        Args:
            token_ids: S tokens; the cache then holds S more.
            logit_rows: R indices into those S rows.
            positions: S absolute positions; ``None`` means they follow the cache. A tree's node sits at the
                cache's length plus its depth. Needs a cache that is not empty, where the kernel counts rows instead.
            mask: bool [S, S], whether row i sees row j of this call; ``None`` means all rows before it. Rows see
                every token of the cache in any case, and never a later row.

        Returns:
            Rows [R, columns that stand for ids], valid until the next call: an array, or what a graph that selects
            gives of them.

        Raises:
            ProviderError: ONNX Runtime failed; the cache holds what it held.
            RequestError: the tokens do not fit into the context, a chain graph is given positions or a mask, or an
                empty cache is given positions.
        """
        rows, past = len(token_ids), self.cache.length
        if not 0 < rows <= self.context - past:
            raise RequestError(f"{rows} tokens do not fit: the cache holds {past} of {self.context}.")
        if self.fixed_rows is not None and rows > self.fixed_rows:
            return self._forward_split(self.fixed_rows, token_ids, logit_rows, positions, mask)
        branched = mask is not None or positions is not None
        if branched and self._trees is None:
            raise RequestError("This graph takes chains only; load a bundle with a tree graph for masks and positions.")
        if positions is not None and past == 0:
            raise RequestError("An empty cache takes no positions; put the first token into it before a tree.")
        session = self._trees if branched else self._session
        assert session is not None
        self._embedding.expect(token_ids)
        wanted = len(logit_rows)
        # The bias of a sliding window counts slots from the true length.
        windowed = session.takes_trees and self._architecture.sliding_window is not None
        shape = self._shapes.of(rows, wanted, past, snaps=not windowed)
        if past + shape.rows > self.cache.capacity:
            self._grow(past + shape.rows)
        call: Any = self._calls.call(session, shape, self.cache)
        call.fill(token_ids, logit_rows, positions, past)
        call.fill_mask(mask, past)
        try:
            self._calls.run(session, call, self.cache, rows)
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise call_failure(error, rows, past) from error
        self.cache.length = past + rows
        if self.cache.taps is not None and self.keeps_taps:
            self.cache.taps.append(past, [tap[:rows] for tap in call.taps])
        if call.selection is not None:
            ids, likeliest, log_sum_exp = (array[:wanted] for array in call.selection)
            return SelectedRows(ids, likeliest, log_sum_exp, self.columns, call.row)
        logits: npt.NDArray[np.float32] = call.logits
        return logits[:wanted]

    def draft(
        self,
        token_ids: Sequence[int],
        steps: int,
        noise: Sequence[npt.NDArray[np.float32]] | None = None,
        inverse_temperature: float = 1.0,
    ) -> DraftedChain:
        """Append tokens to the cache, and draft those that follow in the same call.

        Args:
            token_ids: S tokens; the cache then holds them and all drafted ones but the last.
            steps: how many to draft, one of ``chain_lengths``.
            noise: float32 [columns] for each step, added to the logits at the temperature; ``None`` for the likeliest.
            inverse_temperature: what the logits are multiplied by.

        Raises:
            ProviderError: ONNX Runtime failed; the cache holds what it held.
            RequestError: the tokens do not fit into the context.
        """
        chain, past = self._drafting[steps], self.cache.length
        self._embedding.expect(token_ids)
        slots = chain.slots(len(token_ids))
        if not token_ids or slots > self.context - past:
            raise RequestError(
                f"{len(token_ids)} tokens and {steps} drafted ones do not fit: the cache holds {past} of "
                f"{self.context}."
            )
        if past + slots > self.cache.capacity:
            self._grow(past + slots)
        try:
            drafted = chain.draft(self.cache, token_ids, noise, inverse_temperature)
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise call_failure(error, len(token_ids), past) from error
        self.cache.length = past + slots
        return drafted

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache in chunks, without computing logits."""
        for start in range(0, len(token_ids), PREFILL_ROWS):
            self.forward(token_ids[start : start + PREFILL_ROWS], ())

    def end_profiles(self) -> list[Path]:
        """End the profiles that the settings asked for, and return their files.

        They are of the graph for chains, the one for trees if it is apart, and those that draft several tokens.
        """
        return [session.end_profile() for session in self._sessions()]

    def drop_trees(self) -> None:
        """Close the graph for trees, if it is one apart."""
        if self._trees is not None and self.trees_apart:
            self._calls.forget(self._trees)
            self._trees = None

    def captured_shapes(self, last_row: bool) -> Iterator[CallShape]:
        """The shapes of calls that CUDA graphs are captured for, see :meth:`ShapeGrid.shapes`; none without graphs."""
        return iter(()) if self._captured is None or self._grid is None else self._grid.shapes(last_row)

    def _sessions(self) -> list[GraphSession]:
        """All there are, each once."""
        trees = self._trees if self.trees_apart else None
        sessions = (self._session, trees, *(chain.session for chain in self._drafting.values()))
        return [session for session in sessions if session is not None]

    def _release(self) -> None:
        """Let go of the cache's buffers."""
        self._calls.clear()
        for chain in self._drafting.values():
            chain.release()

    def _grow(self, slots: int) -> None:
        self._release()
        try:
            self.cache.reserve(slots)
        except Exception as error:  # as above
            kind = ProviderError if self._settings.name == "cpu" else DeviceMemoryError
            raise kind(
                f"There is no memory for a KV cache of {slots} tokens ({said(error)}). "
                "What was cached of this text is lost, and will be read again."
            ) from error

    def _forward_split(
        self,
        width: int,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        positions: Sequence[int] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> LogitRows:
        """Run a call wider than the fixed width as several."""
        if mask is not None:
            raise RequestError(f"A masked call has at most {width} rows at fixed width; {len(token_ids)} were given.")
        logits = np.empty((len(logit_rows), self.columns), np.float32)
        for start in range(0, len(token_ids), width):
            stop = min(start + width, len(token_ids))
            wanted = [index for index, row in enumerate(logit_rows) if start <= row < stop]
            part = None if positions is None else positions[start:stop]
            rows = self.forward(token_ids[start:stop], [logit_rows[index] - start for index in wanted], part)
            if stop == len(token_ids) and len(wanted) == len(logit_rows):
                return rows
            logits[wanted] = rows
        return logits
