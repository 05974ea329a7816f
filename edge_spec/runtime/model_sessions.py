"""The sessions of one model: over its graph for chains, over the one for trees, or over one that does both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.graph_checks.graph_check import check_graph
from edge_spec.manifest import CacheType, GraphRecord, ModelRecord
from edge_spec.runtime.device_settings import DeviceSettings
from edge_spec.runtime.graph_session import GraphSession
from edge_spec.runtime.int8_cache import require_int8_cache
from edge_spec.runtime.mapped_weights import SparseRows
from edge_spec.runtime.shared_weights import SharedWeights


@dataclass(frozen=True)
class ModelSessions:
    """Sessions that work on the same cache.

    Attributes:
        chains: for calls whose rows follow one another.
        trees: for calls with positions or a mask, possibly the same; ``None`` if there is none.
        drafting: those that draft several tokens in one call, by how many.
        embedding: what all of them read rows of.
    """

    chains: GraphSession
    trees: GraphSession | None
    drafting: dict[int, GraphSession]
    embedding: SparseRows

    @property
    def graphs_refused(self) -> str | None:
        """Why calls are not captured as CUDA graphs, although they were to be."""
        sessions = (self.chains, self.trees, *self.drafting.values())
        return next((session.graphs_refused for session in sessions if session and session.graphs_refused), None)


def choose_graph(bundle: Bundle, record: ModelRecord, kv: CacheType | None) -> GraphRecord:
    """The graph that does chains: on CPU it does trees as well; on CUDA it has the faster kernel.

    Raises:
        BundleError: there is none with such a cache.
        ProviderError: this ONNX Runtime takes no int8 cache.
    """
    graphs = [graph for graph in record.graphs if graph.steps == 1]
    for graph in graphs:
        if kv is None or graph.kv == kv:
            if graph.kv == "int8":
                require_int8_cache()
            return graph
    offered = " or ".join(dict.fromkeys(graph.kv for graph in graphs))
    raise BundleError(
        f"{bundle.path} is for {bundle.manifest.device} and has no graph with a KV cache in {kv}, only in {offered}."
    )


def open_sessions(
    onnxruntime: Any,
    bundle: Bundle,
    record: ModelRecord,
    graph: GraphRecord,
    providers: Sequence[str],
    threads: int | None,
    settings: DeviceSettings,
) -> ModelSessions:
    """Open what a model needs.

    Args:
        onnxruntime: the imported module.
        bundle: the validated bundle.
        record: the model.
        graph: the one for chains.
        providers: execution providers, the one that does the work first.
        threads: CPU threads, ``None`` for ONNX Runtime's choice.
        settings: how the device is used.

    Raises:
        BundleError: a graph is not one that the exporter writes, or ONNX Runtime refuses it.
        DeviceMemoryError: there is no memory for it.
    """
    apart = None if graph.tree or not settings.tree_graph else _tree_graph(record, graph)
    drafting = [other for other in record.graphs if other.steps > 1 and other.kv == graph.kv]
    if drafting and settings.name != "cpu" and not settings.shares_weights:
        drafting = []  # they would hold the weights once more
    weights = SharedWeights(onnxruntime, settings.name, settings.lending) if settings.shares_weights else None

    embeddings: list[SparseRows] = []

    def opened(graph: GraphRecord) -> GraphSession:
        checked = check_graph(bundle, record, graph)
        path = bundle.path / graph.path
        values = {} if weights is None else weights.values(path.parent, checked.initializers)
        session = GraphSession(
            onnxruntime, path, graph.tree, providers, threads, settings.options, values, settings.profile
        )
        embeddings.append(SparseRows(path.parent, checked.initializers))
        return session

    chains = opened(graph)
    trees = chains if graph.tree else None if apart is None else opened(apart)
    drafts = {other.steps: opened(other) for other in drafting}
    return ModelSessions(chains, trees, drafts, embeddings[0])


def _tree_graph(record: ModelRecord, graph: GraphRecord) -> GraphRecord | None:
    others = (other for other in record.graphs if other.tree and other.kv == graph.kv and other.steps == 1)
    return next(others, None)
