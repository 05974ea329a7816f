"""A recurrent head in an ONNX Runtime session: hidden states and tokens in, logits and its own features out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError, DeviceMemoryError, ProviderError, RequestError
from edge_spec.graph_checks.head_check import check_head_graph
from edge_spec.manifest import CacheType, HeadRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.graph_session import GraphSession, call_failure, said
from edge_spec.runtime.head_calls import HeadCalls, HeadShape
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.mapped_weights import SparseRows
from edge_spec.runtime.model_sessions import choose_graph

# Most rows of a call.
HEAD_ROWS = 64


class HeadModel:
    """The graph of a head that drafts one token after the other, and the cache of the text that it works on.

    Row p stands for the hidden state of token p and the id of token p + 1, and says what token p + 2 is. What the
    target has told of token p comes first; of a token that the target has not seen yet the head takes its own feature,
    which it gave with the logits of the row before.

    Attributes:
        context: most rows of a text.
        columns: how many columns of the logits stand for ids.
        width: elements of a row of taps, those of all taps together.
        hidden: elements of a feature.
        cache: that of the current text.
    """

    def __init__(
        self,
        bundle: Bundle,
        head: HeadRecord,
        providers: Sequence[str],
        context: int,
        threads: int | None = None,
        kv: CacheType | None = None,
        settings: DeviceSettings | None = None,
    ) -> None:
        """Load the head of a bundle.

        Args:
            bundle: the validated bundle.
            head: its head, of a kind that drafts one token a call.
            providers: execution providers, the one that does the work first.
            context: most rows of a text; no more than the head has positions.
            threads: threads of the session, ``None`` for ONNX Runtime's choice.
            kv: type of the KV cache, ``None`` for the head's own.
            settings: how the device is used; ``None`` for all that works there.

        Raises:
            BundleError: the head is of another kind, the graph is not what the exporter writes, ONNX Runtime refuses
                it, or there is none with such a cache.
            DeviceMemoryError: the device has no memory for it.
        """
        self._process = os.getpid()
        self._session: GraphSession | None = None
        if head.tokens != 1:
            raise BundleError(
                f"The {head.kind} head of {bundle.path} proposes {head.tokens} tokens a call, expected 1."
            )
        record, self._facts = head.model, head.model.architecture
        graph = choose_graph(bundle, record, kv)
        settings = settings_for(providers) if settings is None else settings
        self._ort = import_onnxruntime()
        path = bundle.path / graph.path
        checked = check_head_graph(bundle, head)
        self._session = GraphSession(self._ort, path, False, providers, threads, settings.options)
        self._embedding = SparseRows(path.parent, checked.initializers)
        self._device = settings.name
        self._cache_type: Any = np.dtype(graph.kv).type
        self.context = min(context, self._facts.context_length)
        self.columns = min(self._facts.logits_size, bundle.manifest.vocab_size)
        self.width = len(head.taps) * bundle.manifest.target.architecture.hidden_size
        self.cache = self.new_cache()
        compute_type: Any = np.float16 if graph.kv == "float16" else np.float32
        self.hidden, columns = self._facts.hidden_size, self._facts.logits_size
        self._calls = HeadCalls(self._session, self.width, self.hidden, columns, compute_type, self._device, HEAD_ROWS)

    def __del__(self) -> None:
        """In a forked process keep the session for ever: its threads did not come along, and its end waits for them."""
        if self._session is not None and os.getpid() != self._process:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))

    def new_cache(self) -> KVCache:
        """An empty cache for another text, see :meth:`use`."""
        return KVCache(self._ort, self._facts, self.context, self._cache_type, self._device)

    def use(self, cache: KVCache) -> None:
        """Work on the text of another cache from now on."""
        self.cache = cache

    def shrink(self, cache: KVCache, slots: int = 0) -> None:
        """Give back what a cache of this head does not need for so many rows; those behind them are forgotten."""
        if cache is self.cache:
            self._calls.clear()
        cache.shrink(slots)

    def forward(
        self,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        taps: NDArray[np.float32] | None = None,
        features: NDArray[Any] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Append rows to the cache and return what chosen ones say.

        Args:
            token_ids: of each row, the token behind the one whose hidden state it has; at most ``HEAD_ROWS``.
            logit_rows: R indices into the rows.
            taps: float32 [T, width], the target's hidden states, of the first T rows.
            features: [S - T, hidden], the head's own features, of the others.

        Returns:
            Logits, float32 [R, columns that stand for ids]; and features [R, hidden], in the type that the graph
            computes in, for a row behind each. Both are valid until the next call.

        Raises:
            ProviderError: ONNX Runtime failed; the cache holds what it held.
            RequestError: the rows do not fit, or they are not as many as hidden states.
        """
        rows, past = len(token_ids), self.cache.length
        told = 0 if taps is None else len(taps)
        own = 0 if features is None else len(features)
        if not 0 < rows <= min(self.context - past, HEAD_ROWS):
            raise RequestError(
                f"{rows} rows do not fit: the head's cache holds {past} of {self.context}, and a call {HEAD_ROWS}."
            )
        if rows != told + own:
            raise RequestError(f"{rows} tokens came with {told} hidden states and {own} features, expected one each.")
        if past + rows > self.cache.capacity:
            self._grow(past + rows)
        call = self._calls.call(HeadShape(told, own, len(logit_rows)), self.cache)
        self._embedding.expect(token_ids)
        call.fill(token_ids, taps, features, logit_rows, past)
        try:
            self._calls.run(call)
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise call_failure(error, rows, past) from error
        self.cache.length = past + rows
        return call.logits[:, : self.columns], call.features

    def _grow(self, slots: int) -> None:
        self._calls.clear()
        try:
            self.cache.reserve(slots)
        except Exception as error:  # as above
            kind = ProviderError if self._device == "cpu" else DeviceMemoryError
            raise kind(f"There is no memory for the cache of a head with {slots} rows ({said(error)}).") from error
