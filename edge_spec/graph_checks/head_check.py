"""Whether the graph of a head, and the ids of its columns, are what the exporter writes (docs/graph-contract.md)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.graph_checks.block_rules import block_inputs, block_outputs, block_rules
from edge_spec.graph_checks.graph_check import GraphChecker, read_checked
from edge_spec.graph_checks.medusa_rules import medusa_inputs, medusa_outputs, medusa_rules
from edge_spec.graph_checks.recurrent_rules import FEATURE_ROWS, RECURRENT_HEAD_RULES, TAP_ROWS
from edge_spec.manifest import HEAD_IDS, HeadKind, HeadRecord
from edge_spec.onnx_file import FLOAT, INT32, INT64, Declared, OnnxGraph


class HeadChecker(GraphChecker):
    """Walks through the nodes of the graph of a head."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        """Check what was read of the head's graph."""
        super().__init__(parsed, head.model, head.model.graphs[0], bundle)
        self.head = head


class RecurrentHeadChecker(HeadChecker):
    """Of a head that drafts one token after another."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        """Check what was read of the head's graph."""
        super().__init__(parsed, head, bundle)
        self.rules = RECURRENT_HEAD_RULES

    def counts_rows(self, size: int | str) -> bool:
        """Whether a dimension is the rows of the call, or those whose logits are wanted."""
        return size in ("rows", "logit_rows")

    def contract_inputs(self) -> dict[str, Declared]:
        """The inputs that the graph must have."""
        hidden = self.facts.hidden_size
        return {
            "input_ids": Declared(INT64, (1, "rows")),
            "taps": Declared(self.float, (1, TAP_ROWS, len(self.head.taps) * hidden)),
            "features": Declared(self.float, (1, FEATURE_ROWS, hidden)),
            "seqlens_k": Declared(INT32, (1,)),
            "total_sequence_length": Declared(INT32, ()),
            "logit_rows": Declared(INT64, ("logit_rows",)),
            **self.caches("past_key_values"),
        }

    def contract_outputs(self) -> dict[str, Declared]:
        """The outputs that the graph must have."""
        return {
            "logits": Declared(FLOAT, (1, "logit_rows", self.facts.logits_size)),
            "feature": Declared(self.float, (1, "logit_rows", self.facts.hidden_size)),
            **self.caches("present"),
        }


class MedusaChecker(HeadChecker):
    """Of Medusa heads."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        """Check what was read of the heads' graph."""
        super().__init__(parsed, head, bundle)
        self.rules = medusa_rules(head.tokens)

    def contract_inputs(self) -> dict[str, Declared]:
        """The inputs that the graph must have."""
        return medusa_inputs(self.facts.hidden_size, self.float)

    def contract_outputs(self) -> dict[str, Declared]:
        """The outputs that the graph must have."""
        return medusa_outputs(self.head.tokens, self.facts.logits_size)


class BlockChecker(HeadChecker):
    """Of a head that fills a block at once."""

    def __init__(self, parsed: OnnxGraph, head: HeadRecord, bundle: Bundle) -> None:
        """Check what was read of the head's graph."""
        super().__init__(parsed, head, bundle)
        self.tree = True  # attention takes a bias, as where proposals are trees
        self.rules = block_rules(head.block_size)

    def counts_rows(self, size: int | str) -> bool:
        """Whether a dimension is rows of one kind or another."""
        return size in ("rows", "key_rows", "tap_rows", "logit_rows", self.head.block_size)

    def names_rows(self, value: Declared | None) -> bool:
        """Whether an input of the node at hand is the ids of the block, which the embedding has."""
        return self.kind(value) == "Concat"

    def contract_inputs(self) -> dict[str, Declared]:
        """The inputs that the graph must have."""
        return {
            **block_inputs(self.facts, len(self.head.taps), self.float),
            **self.caches("past_key_values"),
        }

    def contract_outputs(self) -> dict[str, Declared]:
        """The outputs that the graph must have."""
        return {**block_outputs(self.facts, self.head.confidence), **self.caches("present")}


_CHECKERS: Mapping[HeadKind, type[HeadChecker]] = {
    "eagle3": RecurrentHeadChecker,
    "mtp": RecurrentHeadChecker,
    "medusa": MedusaChecker,
    "dflash": BlockChecker,
    "dspark": BlockChecker,
}


def check_head_graph(bundle: Bundle, head: HeadRecord) -> OnnxGraph:
    """Check the graph of a bundle's head, and that its weights lie in the bundle; return it.

    Raises:
        BundleError: it cannot be read, or is not what the exporter writes.
    """
    checker = _CHECKERS[head.kind]
    return read_checked(bundle, head.model.graphs[0], lambda parsed: checker(parsed, head, bundle).run())


def read_head_ids(bundle: Bundle, head: HeadRecord) -> npt.NDArray[np.int64] | None:
    """Return the id of every column of a head's logits, int64 [columns], ascending; ``None`` if column i is id i.

    Raises:
        BundleError: the file cannot be read, or names ids that are not ascending or beyond the target's.
    """
    if not head.names_columns:
        return None
    ids = np.frombuffer(bundle.head_ids(), "<u4").astype(np.int64)
    if (
        len(ids) != head.model.architecture.logits_size
        or (ids[1:] <= ids[:-1]).any()
        or (ids[-1:] >= bundle.manifest.vocab_size).any()
    ):
        raise BundleError(
            f"{bundle.path / HEAD_IDS} does not name the ids of the head's columns, ascending and below "
            f"{bundle.manifest.vocab_size}; add the head again."
        )
    return ids
