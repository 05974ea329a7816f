"""Whether the graph of a target's head is one that the exporter writes for the kind its manifest names."""

from __future__ import annotations

from collections.abc import Callable

from edge_spec.block_rules import block_inputs, block_outputs, block_rules
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
    if head.kind not in _CHECKERS:
        raise BundleError(f"{bundle.path} has a head of kind {head.kind!r}, which this edge-spec does not run.")
    checker = _CHECKERS[head.kind]
    return read_checked(bundle, head.model.graphs[0], lambda parsed: checker(parsed, head, bundle).run())


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


class _BlockChecker(GraphChecker):
    """Walks through the nodes of a graph of a head that drafts a block at once."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        super().__init__(parsed, head.model, head.model.graphs[0], bundle)
        self.tree = True  # attention takes a bias, as where proposals are trees
        self._head = head
        self._rules = block_rules(head.block_size)

    def counts_rows(self, size: int | str) -> bool:
        """Whether a dimension is rows of one kind or another."""
        return size in ("rows", "key_rows", "tap_rows", "logit_rows", self._head.block_size)

    def names_rows(self, value: Declared | None) -> bool:
        """Whether an input of the node at hand is the ids of the block, which the embedding has."""
        return self.kind(value) == "Concat"

    def _contract_inputs(self) -> dict[str, Declared]:
        given = block_inputs(self.facts, len(self._head.taps), self.float)
        return {**given, **self._caches("past_key_values")}

    def _contract_outputs(self) -> dict[str, Declared]:
        return {**block_outputs(self.facts, self._head.confidence), **self._caches("present")}


_CHECKERS: dict[str, Callable[[OnnxGraph, HeadRecord, Bundle], GraphChecker]] = {
    "medusa": _MedusaChecker,
    "dflash": _BlockChecker,
    "dspark": _BlockChecker,
}
