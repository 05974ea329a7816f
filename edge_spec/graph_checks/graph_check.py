"""Whether a graph is one that the exporter writes for the architecture its manifest names (docs/graph-contract.md).

ONNX Runtime's kernels do not check everything they are given: a matrix that is smaller than its node says is read
beyond its end. So every node is known here with its attributes, every value gets its type and shape from those before
it, and anything else is refused before ONNX Runtime sees it. Graphs by way of optimum have a check of their own,
:mod:`edge_spec.graph_checks.foreign_graph_check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.graph_checks.draft_chain_rules import NOISE_COLUMNS, draft_chain_rules
from edge_spec.graph_checks.foreign_graph_check import check_foreign_graph
from edge_spec.graph_checks.graph_rule import CONTRIB, MismatchError
from edge_spec.graph_checks.graph_rules import RULES
from edge_spec.manifest import SELECTED_TOKENS, GraphRecord, Manifest, ModelRecord, tap_name
from edge_spec.manifest_check import LARGEST_GRAPH
from edge_spec.onnx_file import (
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    ITEM_BYTES,
    Declared,
    GraphError,
    Node,
    OnnxGraph,
    read_graph,
)
from edge_spec.plain_file import NotPlainError, open_plain

_OPSETS = {"": 23, CONTRIB: 1}

# Bytes of what a call of so many rows holds at once, beside weights and cache. Real models need some hundred megabytes.
_LARGEST_WORKSPACE = 4 << 30
_ROWS = 64


def check_graph(bundle: Bundle, record: ModelRecord, graph: GraphRecord) -> OnnxGraph:
    """Check one graph of a bundle, and that its weights lie in the bundle; return it.

    Raises:
        BundleError: it cannot be read, or is not what the exporter writes.
    """

    def check(parsed: OnnxGraph) -> None:
        if graph.via == "optimum":
            if graph.selects:
                raise GraphError("it is said to select tokens, which no graph by way of optimum does")
            check_foreign_graph(parsed, record.architecture)
        else:
            GraphChecker(parsed, record, graph, bundle).run()

    return read_checked(bundle, graph, check)


def read_checked(bundle: Bundle, graph: GraphRecord, check: Callable[[OnnxGraph], None]) -> OnnxGraph:
    """Read one graph of a bundle, check that its weights lie in the bundle, and what ``check`` does besides.

    Raises:
        BundleError: it cannot be read, or ``check`` raised GraphError.
    """
    file = bundle.path / graph.path
    try:
        with open_plain(bundle.path, graph.path) as opened:
            data = opened.read(LARGEST_GRAPH + 1)
        if len(data) > LARGEST_GRAPH:
            raise GraphError(f"it is longer than {LARGEST_GRAPH:,} bytes")
        parsed = read_graph(data)
        _check_weights(parsed, graph, bundle.manifest)
        check(parsed)
        return parsed
    except GraphError as error:
        raise BundleError(f"{file} is no graph this edge-spec runs: {error}; export the bundle again.") from None
    except (OSError, NotPlainError) as error:
        raise BundleError(f"{file} cannot be read ({error}); copy the whole folder or export it again.") from None


def _check_weights(parsed: OnnxGraph, graph: GraphRecord, manifest: Manifest) -> None:
    """Raise GraphError unless every tensor lies in one of the bundle's files beside the graph."""
    folder = graph.path.rpartition("/")[0]
    used: dict[str, int] = {}
    for name, tensor in parsed.initializers.items():
        place = tensor.external
        if place is None:
            continue
        record = manifest.files.get(f"{folder}/{place.location}")
        if "/" in place.location or record is None or place.location.endswith(".onnx"):
            raise GraphError(f"the weights {name!r} lie in {place.location!r}, which is no weight file of this bundle")
        if place.offset + place.length > record.bytes:
            raise GraphError(f"the weights {name!r} end behind {place.location}")
        used[place.location] = used.get(place.location, 0) + place.length
        # Embedding and lm_head may share their bytes. More sharing would let a small file fill the memory.
        if used[place.location] > 2 * record.bytes:
            raise GraphError(f"its weights use the bytes of {place.location} again and again")


class GraphChecker:
    """Walks through the nodes of one graph, of a decoder unless a subclass says otherwise."""

    def __init__(self, parsed: OnnxGraph, record: ModelRecord, graph: GraphRecord, bundle: Bundle) -> None:
        """Check what was read of one of the bundle's graphs, by what its manifest says of the model."""
        manifest = bundle.manifest
        self._parsed = parsed
        self.facts = record.architecture
        self.float = FLOAT if manifest.device_of(record) == "cpu" else FLOAT16
        self.tree = graph.tree
        self.quantized_cache = graph.kv == "int8"
        self.selects = graph.selects
        self._taps = graph.taps
        self.positions = max(manifest.context_length if record is manifest.target else 0, self.facts.context_length)
        dtype = INT8 if self.quantized_cache else self.float
        self.cache = Declared(dtype, (1, self.facts.kv_heads, "capacity", self.facts.head_size))
        self.steps = graph.steps
        self.columns = manifest.usable_columns(record)
        speech = manifest.draft_vocabulary
        names_columns = self.steps > 1 and speech is not None and speech.names_columns
        self.column_ids = np.frombuffer(bundle.draft_ids(), "<u4").astype("<i8").tobytes() if names_columns else b""
        self.rules = RULES if self.steps == 1 else draft_chain_rules(self.steps)
        self._kinds: dict[str, str] = {}
        self._values: dict[str, Declared] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        """Raise GraphError unless everything fits."""
        parsed, inputs = self._parsed, self.contract_inputs()
        if dict(parsed.opsets) != _OPSETS:
            raise GraphError(f"its operator sets are {dict(parsed.opsets)}, expected {_OPSETS}")
        if dict(parsed.inputs) != inputs:
            raise GraphError(
                f"its inputs are not those of its architecture ({_first_difference(parsed.inputs, inputs)})"
            )
        self._values |= inputs
        for name, tensor in parsed.initializers.items():
            self._define(name, Declared(tensor.dtype, tensor.shape))
        for node in parsed.nodes:
            self._apply(node)
        _check_workspace(parsed.nodes, self._values)
        outputs = self.contract_outputs()
        computed = {name: self._values.get(name) for name in outputs}
        for found in (dict(parsed.outputs), computed):
            if found != outputs:
                raise GraphError(f"its outputs are not those of its architecture ({_first_difference(found, outputs)})")
        for name, declared in parsed.declared.items():
            if self._values.get(name) != declared:
                raise GraphError(f"it declares {name!r} as something else than it is")

    def contents(self, value: Declared | None) -> bytes:
        """The bytes of a constant in the graph; none for other values."""
        tensor = self._parsed.initializers.get(self._names.get(id(value), ""))
        return b"" if tensor is None else tensor.raw

    def name(self, value: Declared | None) -> str:
        """What an input of the node at hand is called."""
        return self._names.get(id(value), "")

    def kind(self, value: Declared | None) -> str:
        """The kind of node that gives an input of the node at hand; none for other values."""
        return self._kinds.get(self.name(value), "")

    def counts_rows(self, size: int | str) -> bool:
        """Whether a dimension is the rows of a step: those of the call, or the one row of each later step."""
        return size == "rows" or (self.steps > 1 and size == 1)

    def names_rows(self, value: Declared | None) -> bool:
        """Whether an input of the node at hand is the ids of a step's rows, which the embedding has."""
        chosen = "Gather" if self.column_ids else "ArgMax"
        return self.name(value) == "input_ids" or (self.steps > 1 and self.kind(value) == chosen)

    def _apply(self, node: Node) -> None:
        where = f"node {node.kind!r} ({', '.join(node.outputs)[:60]})"
        rule = self.rules.get((node.domain, node.kind))
        if rule is None:
            raise GraphError(f"{where} is of a kind that the exporter never writes")
        attributes: dict[str, int | float | str] = {}
        for name, value in node.attributes.items():
            allowed = rule.attributes.get(name)
            if isinstance(allowed, type):
                sound = isinstance(value, allowed)
            else:
                sound = allowed is not None and isinstance(value, int | str) and value in allowed
            if not sound or isinstance(value, tuple):
                raise GraphError(f"{where} has the attribute {name} = {value!r}, which the exporter never writes")
            attributes[name] = value
        if missing := [name for name in rule.attributes if name not in (*node.attributes, *rule.optional)]:
            raise GraphError(f"{where} lacks the attribute {missing[0]}")
        if len(node.inputs) not in rule.inputs or len(node.outputs) not in rule.outputs:
            raise GraphError(f"{where} has {len(node.inputs)} inputs and {len(node.outputs)} outputs")
        if unknown := [name for name in node.inputs if name and name not in self._values]:
            raise GraphError(f"{where} uses {unknown[0]!r}, which nothing before it gives")
        # Equal declarations are different objects, by which a rule can ask for a value's name.
        inputs = [Declared(v.dtype, v.shape) if (v := self._values.get(name)) else None for name in node.inputs]
        self._names = {id(value): name for value, name in zip(inputs, node.inputs, strict=True)}
        try:
            results = rule.shape(self, inputs, attributes)
        except MismatchError:
            given = ", ".join("none" if value is None else f"{value.dtype}:{list(value.shape)}" for value in inputs)
            raise GraphError(f"{where} does not fit its inputs {given}") from None
        for name, result in zip(node.outputs, results, strict=True):
            self._define(name, result)
            self._kinds[name] = node.kind

    def _define(self, name: str, value: Declared) -> None:
        if not name or name in self._values:
            raise GraphError(f"two values are called {name!r}")
        self._values[name] = value

    def contract_inputs(self) -> dict[str, Declared]:
        """The inputs that the graph must have."""
        if self.steps > 1:
            return {
                "input_ids": Declared(INT64, (1, "rows")),
                "seqlens_k": Declared(INT32, (1,)),
                "total_sequence_length": Declared(INT32, ()),
                "inverse_temperature": Declared(FLOAT, (1,)),
                "noise": Declared(FLOAT, (self.steps, NOISE_COLUMNS)),
                **self.caches("past_key_values"),
            }
        bias = {
            "tree_bias": Declared(self.float, (1, 1, "rows", "rows")),
            "tree_bias_padding": Declared(INT64, (2,)),
        }
        return {
            "input_ids": Declared(INT64, (1, "rows")),
            "position_ids": Declared(INT64, (1, "rows")),
            "seqlens_k": Declared(INT32, (1,)),
            "total_sequence_length": Declared(INT32, ()),
            **(bias if self.tree else {}),
            "logit_rows": Declared(INT64, ("logit_rows",)),
            **self.caches("past_key_values"),
        }

    def contract_outputs(self) -> dict[str, Declared]:
        """The outputs that the graph must have."""
        most = min(SELECTED_TOKENS, self.columns)
        selected = {
            "top_logits": Declared(FLOAT, (1, "logit_rows", most)),
            "top_ids": Declared(INT64, (1, "logit_rows", most)),
            "log_sum_exp": Declared(FLOAT, (1, "logit_rows")),
        }
        if self.steps > 1:
            chosen = (1, self.steps)
            outputs = {"draft_ids": Declared(INT64, chosen), "draft_shares": Declared(FLOAT, chosen)}
            for step in range(self.steps):
                outputs |= self.caches(f"present.{step}")
            return outputs
        logits = Declared(FLOAT, (1, "logit_rows", self.facts.logits_size))
        stream = Declared(self.float, (1, "rows", self.facts.hidden_size))
        taps = {tap_name(tap): stream for tap in self._taps}
        return {"logits": logits, **(selected if self.selects else {}), **self.caches("present"), **taps}

    def caches(self, prefix: str) -> dict[str, Declared]:
        """Keys and values of all layers."""
        names = (f"{prefix}.{layer}.{part}" for layer in range(self.facts.layers) for part in ("key", "value"))
        return dict.fromkeys(names, self.cache)


def _check_workspace(nodes: Sequence[Node], values: Mapping[str, Declared]) -> None:
    """Raise GraphError if the values that are needed at the same time are more than any model's."""
    last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
    size = {name: _bytes(values[name]) for node in nodes for name in node.outputs}
    held = 0
    for index, node in enumerate(nodes):
        held += sum(size[name] for name in node.outputs)
        if held > _LARGEST_WORKSPACE:
            raise GraphError(f"a call would hold more than {_LARGEST_WORKSPACE:,} bytes at once")
        held -= sum(size.get(name, 0) for name in {*node.inputs} if last_use[name] == index)
        held -= sum(size[name] for name in node.outputs if name not in last_use)


def _bytes(value: Declared) -> int:
    """Bytes of a value in a call; the cache is not its own, and the bias counts no more than the rows."""
    if "capacity" in value.shape:
        return 0
    return ITEM_BYTES[value.dtype] * math.prod(_ROWS if isinstance(size, str) else size for size in value.shape)


def _first_difference(found: Mapping[str, Declared | None], expected: Mapping[str, Declared]) -> str:
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            return f"{name} is {found.get(name)}, expected {expected.get(name)}"
    return "their order"
