"""One model of the pair in an ONNX Runtime session: rows of tokens in, logits out, KV cache kept in place."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError, ProviderError, RequestError
from edge_spec.graph_check import check_graph
from edge_spec.manifest import CacheType, GraphRecord, ModelRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.call_buffers import CallBuffers, ChainCallBuffers
from edge_spec.runtime.draft_chain import DraftChain, DraftedChain
from edge_spec.runtime.int8_cache import require_int8_cache
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.mapped_weights import read_sparingly
from edge_spec.runtime.new_rows import NewRows

# Rows of one prefill call: wide enough to use the matrix kernels well, small enough to bound the workspace.
PREFILL_ROWS = 64

# No kernel takes rows in smaller blocks than this. In wider calls a last block of one row would round differently, so
# those get an even number of rows (docs/exactness.md).
_ONE_BLOCK_ROWS = 16

# Shapes of calls whose buffers are kept. Each takes some kilobytes for its reference to every layer's cache.
_MOST_SHAPES = 64


class Model:
    """A graph, and the cache of the text that it works on.

    ``forward`` never reads or writes beyond what it is told: tokens are appended to the cache, and whoever wants
    them gone again calls ``cache.rollback``.

    Attributes:
        context: most tokens of a text.
        positions: how many positions the rotary table has for sure.
        columns: how many columns of the logits stand for ids.
        cache: that of the current text.
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
    ) -> None:
        """Load a model of a bundle.

        Args:
            bundle: the validated bundle.
            record: which of its models.
            providers: execution providers, the one that does the work first.
            context: most tokens of a text.
            exact_rows: whether a row must have the same bits whatever rows travel with it, which a target owes so
                that speculation does not show. Calls are padded for it: kernels for one row round differently from
                those for several.
            threads: threads of the session, ``None`` for ONNX Runtime's choice.
            fixed_rows: give every session call exactly this many rows, by padding and by splitting. The dear way to
                bitwise exactness, for kernels that round differently for every width.
            kv: type of the KV cache, ``None`` for the model's own.

        Raises:
            BundleError: the graph is not one that the exporter writes, ONNX Runtime refuses it, or the bundle has none
                with such a cache.
            ProviderError: this ONNX Runtime takes no int8 cache.
        """
        self._process = os.getpid()
        self._session: Any = None
        self._chains: dict[int, DraftChain] = {}
        self._ort = import_onnxruntime()
        self._device = "cuda" if providers[0].startswith("CUDA") else "cpu"
        self._dtype: Any = np.float16 if self._device == "cuda" else np.float32
        self._exact_rows = exact_rows
        self._fixed_rows = fixed_rows
        self.columns = bundle.manifest.usable_columns(record)
        self._logits_size = record.architecture.logits_size
        graph = _choose_graph(bundle, record, kv)
        self._takes_trees = graph.tree
        checked = check_graph(bundle, record, graph)
        self._path = bundle.path / graph.path
        self._session = self._open(self._path, providers, threads)
        for chain in record.graphs:
            if chain.steps > 1 and chain.kv == graph.kv:
                check_graph(bundle, record, chain)
                session = self._open(bundle.path / chain.path, providers, threads)
                self._chains[chain.steps] = DraftChain(self._ort, session, chain.steps, self.columns)
        for name, tensor in checked.initializers.items():
            # Of these a text reads a row for each of its tokens; everything else is read in every call.
            if name.startswith("embedding.") and tensor.external is not None:
                read_sparingly(self._path.parent / tensor.external.location, tensor.external.offset)
        self.context = context
        self.positions = record.architecture.context_length
        self._architecture = record.architecture
        self._cache_type: Any = np.dtype(graph.kv).type
        # A graph by way of optimum only reads the cache.
        self._new_rows = NewRows(record.architecture, PREFILL_ROWS) if graph.via == "optimum" else None
        self.cache = self.new_cache()
        self._calls: dict[tuple[int, int], CallBuffers | ChainCallBuffers] = {}
        self._bound = self.cache.version  # of the buffers that these calls are bound to
        self._logits = np.empty((0, self._logits_size), np.float32)

    def __del__(self) -> None:
        """In a forked process keep the session for ever: its threads did not come along, and its end waits for them."""
        if os.getpid() != self._process:
            for session in (self._session, *(chain.session for chain in self._chains.values())):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

    @property
    def fixed_rows(self) -> int | None:
        """Rows of every session call; ``None`` where a call has as many as it is given."""
        return self._fixed_rows

    @property
    def takes_trees(self) -> bool:
        """Whether the graph takes positions and masks."""
        return self._takes_trees

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """How many tokens one call can draft, the fewest first; none where each needs a call of its own."""
        return tuple(sorted(self._chains))

    @property
    def slides(self) -> bool:
        """Whether tokens can be dropped from the middle of the cache while others go on behind them."""
        return self._takes_trees and self._device == "cpu"

    @property
    def widest_tree(self) -> int:
        """Most draft tokens of one call that travel with the text's last token."""
        return (self._fixed_rows or PREFILL_ROWS) - 1

    def new_cache(self) -> KVCache:
        """An empty cache for another text, see :meth:`use`."""
        # Padding rows are written behind the last token, so the buffers may grow that much longer.
        slots = self.context + (self._fixed_rows or 1)
        return KVCache(self._ort, self._architecture, slots, self._cache_type, self._device)

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
    ) -> npt.NDArray[np.float32]:
        """Append tokens to the cache and return the logits of chosen rows.

        Args:
            token_ids: S tokens; the cache then holds S more.
            logit_rows: R indices into those S rows.
            positions: S absolute positions; ``None`` means they follow the cache. A tree's node sits at the
                cache's length plus its depth. Needs a cache that is not empty, where the kernel counts rows instead.
            mask: bool [S, S], whether row i sees row j of this call; ``None`` means all rows before it. Rows see
                every token of the cache in any case, and never a later row.

        Returns:
            float32 [R, columns that stand for ids], valid until the next call.

        Raises:
            ProviderError: ONNX Runtime failed; the cache holds what it held.
            RequestError: the tokens do not fit into the context, a chain graph is given positions or a mask, or an
                empty cache is given positions.
        """
        rows, past = len(token_ids), self.cache.length
        if not 0 < rows <= self.context - past:
            raise RequestError(f"{rows} tokens do not fit: the cache holds {past} of {self.context}.")
        if self._fixed_rows is not None and rows > self._fixed_rows:
            return self._forward_split(self._fixed_rows, token_ids, logit_rows, positions, mask)
        if not self._takes_trees and not (mask is None and positions is None):
            raise RequestError("This graph takes chains only; load a bundle with a tree graph for masks and positions.")
        if positions is not None and past == 0:
            raise RequestError("An empty cache takes no positions; put the first token into it before a tree.")
        padded, wanted = self._padded(rows), len(logit_rows)
        if past + padded > self.cache.capacity:
            self._grow(past + padded)
        # The kernel of the last matrix depends on its rows as well, so they are padded likewise.
        call = self._call(padded, max(self._padded(wanted), wanted) if wanted else 0)
        call.fill(token_ids, logit_rows, positions, past)
        if isinstance(call, CallBuffers) and self._takes_trees:
            call.fill_mask(mask, past)
        try:
            self._session.run_with_iobinding(call.binding)
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise _failed(error, rows, past) from error
        if self._new_rows is not None:
            self._new_rows.append_to(self.cache, past, padded, rows)
        self.cache.length = past + rows
        return call.logits[:wanted]

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
        chain, past = self._chains[steps], self.cache.length
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
            raise _failed(error, len(token_ids), past) from error
        self.cache.length = past + slots
        return drafted

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache in chunks, without computing logits."""
        for start in range(0, len(token_ids), PREFILL_ROWS):
            self.forward(token_ids[start : start + PREFILL_ROWS], ())

    def _release(self) -> None:
        """Let go of the cache's buffers, which the calls hold."""
        self._calls.clear()
        for chain in self._chains.values():
            chain.release()

    def _grow(self, slots: int) -> None:
        self._release()
        try:
            self.cache.reserve(slots)
        except Exception as error:  # as above
            raise ProviderError(
                f"There is no memory for a KV cache of {slots} tokens ({' '.join(str(error).split())}). "
                "What was cached of this text is lost, and will be read again."
            ) from error

    def _forward_split(
        self,
        width: int,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        positions: Sequence[int] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> npt.NDArray[np.float32]:
        """Run a call wider than the fixed width as several."""
        if mask is not None:
            raise RequestError(f"A masked call has at most {width} rows at fixed width; {len(token_ids)} were given.")
        logits = np.empty((len(logit_rows), self.columns), np.float32)
        for start in range(0, len(token_ids), width):
            stop = min(start + width, len(token_ids))
            wanted = [index for index, row in enumerate(logit_rows) if start <= row < stop]
            part = None if positions is None else positions[start:stop]
            logits[wanted] = self.forward(token_ids[start:stop], [logit_rows[index] - start for index in wanted], part)
        return logits

    def _padded(self, rows: int) -> int:
        if self._fixed_rows is not None:
            return self._fixed_rows
        if not self._exact_rows:
            return rows
        return rows + rows % 2 if rows > _ONE_BLOCK_ROWS else max(rows, 2)

    def _open(self, path: Path, providers: Sequence[str], threads: int | None) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        # Attention sees one column more in every call, and a memory pattern would be kept for each number of them.
        options.enable_mem_pattern = False
        # Target and draft take turns on the same cores: threads that wait for work by spinning would steal them.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            return self._ort.InferenceSession(str(path), options, providers=list(providers))
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise BundleError(f"ONNX Runtime cannot load {path}: {' '.join(str(error).split())}") from error

    def _call(self, rows: int, logit_rows: int) -> CallBuffers | ChainCallBuffers:
        """The buffers of calls of this shape."""
        if self._bound != self.cache.version:
            self._calls.clear()
            self._bound = self.cache.version
        call = self._calls.get((rows, logit_rows))
        if call is None:
            if logit_rows > len(self._logits):  # all calls write their logits into the same memory
                self._calls.clear()
                self._logits = np.empty((logit_rows, self._logits_size), np.float32)
            elif len(self._calls) == _MOST_SHAPES:
                del self._calls[next(iter(self._calls))]
            call = self._bound_call(rows, self._logits[:logit_rows])
            self._calls[rows, logit_rows] = call
        return call

    def _bound_call(self, rows: int, logits: npt.NDArray[np.float32]) -> CallBuffers | ChainCallBuffers:
        binding = self._session.io_binding()
        if self._new_rows is None:
            self.cache.bind(binding)
            bias_type = self._dtype if self._takes_trees else None
            return CallBuffers(self._ort, binding, rows, bias_type, logits, self.columns)
        if rows > self._new_rows.most:
            self._calls.clear()  # they write into the memory that is too small
            self._new_rows = NewRows(self._architecture, rows)
        self.cache.bind(binding, written=False)
        self._new_rows.bind(binding, rows)
        return ChainCallBuffers(self._ort, binding, rows, logits, self.columns)


def _failed(error: Exception, rows: int, past: int) -> ProviderError:
    return ProviderError(
        f"ONNX Runtime failed in a call with {rows} rows behind {past} cached tokens: "
        f"{' '.join(str(error).split())}. Nothing of it counts; the engine can go on."
    )


def _choose_graph(bundle: Bundle, record: ModelRecord, kv: CacheType | None) -> GraphRecord:
    """The graph to open: one does chains and trees on CPU; on CUDA the first is for chains, the faster kernel."""
    for graph in record.graphs:
        if graph.steps == 1 and (kv is None or graph.kv == kv):
            if graph.kv == "int8":
                require_int8_cache()
            return graph
    offered = " or ".join(dict.fromkeys(graph.kv for graph in record.graphs))
    raise BundleError(
        f"{bundle.path} is for {bundle.manifest.device} and has no graph with a KV cache in {kv}, only in {offered}."
    )
