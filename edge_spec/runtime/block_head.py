"""The graph of a head that drafts a block at once: hidden states of the target in, logits of all its places out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_spec.bundle import Bundle
from edge_spec.graph_checks.head_check import check_head_graph
from edge_spec.manifest import HeadRecord
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.graph_session import GraphSession, call_failure
from edge_spec.runtime.kv_cache import KVCache
from edge_spec.runtime.mapped_weights import SparseRows
from edge_spec.runtime.markov_bias import MarkovBias
from edge_spec.runtime.provider import CUDA_PROVIDER


class BlockHead:
    """A DFlash or DSpark head. What it keeps of a text are the keys and values of features, one for each token.

    Attributes:
        tokens: most tokens that a call drafts.
        context: most tokens in a cache, whose positions it knows.
        width: elements of a row of hidden states, those of all taps together.
        columns: of its logits.
        markov: what the token before adds to the logits of the one to come; ``None`` without.
        confident: whether it says how likely a token is to be accepted.
        cache: that of the text it worked on last.
    """

    def __init__(
        self,
        bundle: Bundle,
        record: HeadRecord,
        providers: Sequence[str],
        context: int,
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Load the head of a bundle.

        Args:
            bundle: the validated bundle.
            record: its head, of kind ``"dflash"`` or ``"dspark"``.
            providers: execution providers, the one that does the work first.
            context: most tokens of a text.
            threads: CPU threads, ``None`` for ONNX Runtime's choice.
            options: of the CUDA provider.

        Raises:
            BundleError: the graph is not one that the exporter writes, or ONNX Runtime refuses it.
            DeviceMemoryError: there is no memory for it.
        """
        graph = record.model.graphs[0]
        checked = check_head_graph(bundle, record)
        self._facts = record.model.architecture
        self.tokens, self._block = record.tokens, record.block_size
        self.context = min(context, self._facts.context_length)
        self.width = len(record.taps) * bundle.manifest.target.architecture.hidden_size
        self.columns = bundle.manifest.vocab_size
        self.confident = record.confidence
        self.markov = MarkovBias.of_bundle(bundle, record) if record.markov_rank else None
        self._type: Any = np.float16 if graph.kv == "float16" else np.float32
        self._device = "cuda" if providers[0] == CUDA_PROVIDER else "cpu"
        path = bundle.path / graph.path
        self._ort = import_onnxruntime()
        self._session = GraphSession(self._ort, path, False, providers, threads, options)
        self._embedding = SparseRows(path.parent, checked.initializers)
        self.cache = self.new_cache()

    @property
    def moves_slots(self) -> bool:
        """Whether tokens of a cache can be moved to other slots."""
        return self._device == "cpu"

    def new_cache(self) -> KVCache:
        """An empty cache for a text. It has room for the rows of a block, which are written behind the features'."""
        slots = self.context + 2 * self._block
        return KVCache(self._ort, self._facts, slots, self._type, self._device)

    def shrink(self, cache: KVCache, slots: int = 0) -> None:
        """Give back what a cache does not need for so many slots; tokens behind them are forgotten."""
        cache.shrink(slots)

    def slots(self, tokens: int) -> int:
        """Slots that a cache needs for so many tokens."""
        return tokens + 2 * self._block

    def draft(
        self, cache: KVCache, taps: NDArray[np.float32], position: int, anchor: int, places: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Read hidden states, and say what stands in the places behind the anchor, the token after the last of them.

        Args:
            cache: of the text; it then holds as many tokens more as there are hidden states.
            taps: float32 [rows, taps * hidden], one row at least.
            position: of the first of them. Positions count from where reading of the text began.
            anchor: the token, which the target has not read.
            places: how many, from the first one.

        Returns:
            Logits, float32 [places, columns], and what the head's output says of confidence, float32 [places]: what
            the token before adds to it is not in there; ``None`` if it says nothing.

        Raises:
            ProviderError: ONNX Runtime failed; what the cache holds is lost.
        """
        self.cache = cache
        rows, block, past = len(taps), self._block, cache.length
        keys = rows + block
        total = keys + block  # the block's queries stand behind its keys
        self._embedding.expect((anchor,))
        try:
            cache.reserve(past + total)
            binding = self._session.binding()
            cache.bind(binding)
            own = np.zeros((1, 1, total, total), self._type)
            own[..., keys:] = -np.inf  # where queries stand there are no keys
            first = block - self.tokens
            inputs = {
                "input_ids": np.array([[anchor]]),
                "taps": taps[None].astype(self._type, copy=False),
                "position_ids": np.arange(position, position + keys)[None],
                "query_rows": np.r_[np.zeros(keys, np.int64), np.arange(block)],
                "key_rows": np.r_[np.arange(keys), np.zeros(block, np.int64)],
                "seqlens_k": np.array([past + total - 1], np.int32),
                "total_sequence_length": np.array(past + total, np.int32),
                "tree_bias": own,
                "tree_bias_padding": np.array([past, 0]),
                "logit_rows": np.arange(first, first + places),
            }
            # What is bound has to stay where it is until the call is over.
            held = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
            for name, value in held.items():
                binding.bind_cpu_input(name, value)
            outputs = {"logits": np.empty((1, places, self._facts.logits_size), np.float32)}
            if self.confident:
                outputs["confidence"] = np.empty((1, places, 1), np.float32)
            for name, value in outputs.items():
                binding.bind_output(name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
            self._session.run(binding)
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            cache.rollback(0)
            raise call_failure(error, total, past) from error
        cache.length = past + rows
        return outputs["logits"][0, :, : self.columns], outputs["confidence"][0, :, 0] if self.confident else None
