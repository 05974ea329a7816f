"""The graph of Medusa heads in an ONNX Runtime session: a hidden state of the target in, logits of all heads out."""

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


class MedusaHeads:
    """All heads of a target. A call of them leaves nothing behind.

    Attributes:
        count: how many there are. From the hidden state of token p, head h says what token p + 2 + h is.
        columns: of their logits.
    """

    def __init__(
        self,
        bundle: Bundle,
        record: HeadRecord,
        providers: Sequence[str],
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Load the heads of a bundle.

        Args:
            bundle: the validated bundle.
            record: its head, of kind ``"medusa"``.
            providers: execution providers, the one that does the work first.
            threads: CPU threads, ``None`` for ONNX Runtime's choice.
            options: of the CUDA provider.

        Raises:
            BundleError: the graph is not one that the exporter writes, or ONNX Runtime refuses it.
            DeviceMemoryError: there is no memory for it.
        """
        graph = record.model.graphs[0]
        check_head_graph(bundle, record)
        self.count = record.tokens
        self.columns = record.model.architecture.logits_size
        if not record.names_columns:  # what lies behind the vocabulary is padding
            self.columns = min(self.columns, bundle.manifest.vocab_size)
        self._type: Any = np.float16 if graph.kv == "float16" else np.float32
        path = bundle.path / graph.path
        self._session = GraphSession(import_onnxruntime(), path, False, providers, threads, options)

    def logits(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the heads say.

        Args:
            state: float32 [1, hidden], the residual stream behind the target's last layer.

        Returns:
            float32 [count, columns].

        Raises:
            ProviderError: ONNX Runtime failed.
        """
        try:
            (logits,) = self._session.session.run(["logits"], {"taps": state[None].astype(self._type)})
        except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
            raise call_failure(error, 1, 0) from error
        told: NDArray[np.float32] = logits[:, 0, : self.columns]
        return told
