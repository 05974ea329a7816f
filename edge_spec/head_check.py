"""Whether the graph of a target's head is one that the exporter writes for the kind its manifest names."""

from __future__ import annotations

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.graph_check import GraphChecker, read_checked
from edge_spec.manifest import HeadRecord
from edge_spec.medusa_rules import medusa_inputs, medusa_outputs, medusa_rules
from edge_spec.onnx_file import Declared, OnnxGraph


def check_head_graph(bundle: Bundle, head: HeadRecord) -> OnnxGraph:
    """Check the graph of a bundle's head, and that its weights lie in the bundle; return it.

    Raises:
        BundleError: it cannot be read, or is not what the exporter writes.
    """
    if head.kind != "medusa":
        raise BundleError(f"{bundle.path} has a head of kind {head.kind!r}, which this edge-spec does not run.")
    record = head.model
    return read_checked(bundle, record.graphs[0], lambda parsed: _MedusaChecker(parsed, head, bundle).run())


class _MedusaChecker(GraphChecker):
    """Walks through the nodes of a graph of Medusa heads."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        super().__init__(parsed, head.model, head.model.graphs[0], bundle)
        self._heads = head.tokens
        self._rules = medusa_rules(head.tokens)

    def _contract_inputs(self) -> dict[str, Declared]:
        return medusa_inputs(self.facts.hidden_size, self.float)

    def _contract_outputs(self) -> dict[str, Declared]:
        return medusa_outputs(self._heads, self.facts.logits_size)
