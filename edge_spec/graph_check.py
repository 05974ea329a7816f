"""Whether a graph is one that the exporter writes for the architecture its manifest names (docs/graph-contract.md).

ONNX Runtime's kernels do not check everything they are given: a matrix that is smaller than its node says is read
beyond its end. So every node is known here with its attributes, every value gets its type and shape from those before
it, and anything else is refused before ONNX Runtime sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_spec.bundle import Bundle, GraphRecord, Manifest, ModelRecord
from edge_spec.errors import BundleError
from edge_spec.manifest_check import LARGEST_GRAPH
from edge_spec.onnx_file import (
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    UINT8,
    Declared,
    GraphError,
    Node,
    OnnxGraph,
    Shape,
    read_graph,
)
from edge_spec.plain_file import NotPlainError, open_plain

_CONTRIB = "com.microsoft"
_OPSETS = {"": 23, _CONTRIB: 1}
_BLOCK_SIZES = (16, 32, 64, 128, 256)

Inputs = Sequence[Declared | None]
Attributes = Mapping[str, int | float | str]


def check_graph(bundle: Bundle, record: ModelRecord, graph: GraphRecord) -> None:
    """Check one graph of a bundle, and that its weights lie in the bundle.

    Raises:
        BundleError: it cannot be read, or is not what the exporter writes.
    """
    file = bundle.path / graph.path
    try:
        with open_plain(bundle.path, graph.path) as opened:
            data = opened.read(LARGEST_GRAPH + 1)
        if len(data) > LARGEST_GRAPH:
            raise GraphError(f"it is longer than {LARGEST_GRAPH:,} bytes")
        parsed = read_graph(data)
        _check_weights(parsed, graph, bundle.manifest)
        _Checker(parsed, record, graph, bundle.manifest).run()
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


@dataclass(frozen=True)
class _Rule:
    """What a kind of node is given, and what comes out."""

    inputs: tuple[int, ...]
    outputs: int
    attributes: Mapping[str, Sequence[int | str] | type]
    shape: Callable[[_Checker, Inputs, Attributes], Sequence[Declared]]
    optional: tuple[str, ...] = ()


class _Checker:
    """Walks through the nodes of one graph."""

    def __init__(self, parsed: OnnxGraph, record: ModelRecord, graph: GraphRecord, manifest: Manifest) -> None:
        self._parsed = parsed
        self.facts = record.architecture
        self.float = FLOAT if manifest.device == "cpu" else FLOAT16
        self.tree = graph.tree
        self.quantized_cache = graph.kv == "int8"
        self.positions = max(manifest.context_length if record is manifest.target else 0, self.facts.context_length)
        self._values: dict[str, Declared] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        """Raise GraphError unless everything fits."""
        parsed, inputs = self._parsed, self._contract_inputs()
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
        outputs = self._contract_outputs()
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

    def _apply(self, node: Node) -> None:
        where = f"node {node.kind!r} ({', '.join(node.outputs)[:60]})"
        rule = _RULES.get((node.domain, node.kind))
        if rule is None:
            raise GraphError(f"{where} is of a kind that the exporter never writes")
        for name, value in node.attributes.items():
            allowed = rule.attributes.get(name)
            if isinstance(allowed, type):
                sound = isinstance(value, allowed)
            else:
                sound = allowed is not None and isinstance(value, int | str) and value in allowed
            if not sound:
                raise GraphError(f"{where} has the attribute {name} = {value!r}, which the exporter never writes")
        if missing := [name for name in rule.attributes if name not in (*node.attributes, *rule.optional)]:
            raise GraphError(f"{where} lacks the attribute {missing[0]}")
        if len(node.inputs) not in rule.inputs or len(node.outputs) != rule.outputs:
            raise GraphError(f"{where} has {len(node.inputs)} inputs and {len(node.outputs)} outputs")
        if unknown := [name for name in node.inputs if name and name not in self._values]:
            raise GraphError(f"{where} uses {unknown[0]!r}, which nothing before it gives")
        # Equal declarations are different objects, by which a rule can ask for a value's name.
        inputs = [Declared(v.dtype, v.shape) if (v := self._values.get(name)) else None for name in node.inputs]
        self._names = {id(value): name for value, name in zip(inputs, node.inputs, strict=True)}
        try:
            results = rule.shape(self, inputs, node.attributes)
        except _MismatchError:
            given = ", ".join("none" if value is None else f"{value.dtype}:{list(value.shape)}" for value in inputs)
            raise GraphError(f"{where} does not fit its inputs {given}") from None
        for name, result in zip(node.outputs, results, strict=True):
            self._define(name, result)

    def _define(self, name: str, value: Declared) -> None:
        if not name or name in self._values:
            raise GraphError(f"two values are called {name!r}")
        self._values[name] = value

    def _contract_inputs(self) -> dict[str, Declared]:
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
            **self._caches("past_key_values"),
        }

    def _contract_outputs(self) -> dict[str, Declared]:
        logits = Declared(FLOAT, (1, "logit_rows", self.facts.logits_size))
        return {"logits": logits, **self._caches("present")}

    def _caches(self, prefix: str) -> dict[str, Declared]:
        names = (f"{prefix}.{layer}.{part}" for layer in range(self.facts.layers) for part in ("key", "value"))
        return dict.fromkeys(names, self.cache)

    @property
    def cache(self) -> Declared:
        """Keys or values of one layer."""
        dtype = INT8 if self.quantized_cache else self.float
        return Declared(dtype, (1, self.facts.kv_heads, "capacity", self.facts.head_size))


class _MismatchError(Exception):
    """The inputs of a node do not fit each other."""


def _need(condition: bool) -> None:
    if not condition:
        raise _MismatchError


def _given(value: Declared | None, dtype: int | tuple[int, ...], shape: Shape | None = None) -> Declared:
    """Return an input, which must be there, of such a type, and of that shape if one is named."""
    if value is None or value.dtype not in ((dtype,) if isinstance(dtype, int) else dtype):
        raise _MismatchError
    _need(shape is None or value.shape == shape)
    return value


def _columns(value: Declared) -> int:
    """Size of the last dimension."""
    last = value.shape[-1] if value.shape else None
    if not isinstance(last, int):
        raise _MismatchError
    return last


def _first_difference(found: Mapping[str, Declared | None], expected: Mapping[str, Declared]) -> str:
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            return f"{name} is {found.get(name)}, expected {expected.get(name)}"
    return "their order"


_FLOATS = (FLOAT, FLOAT16)


def _gather(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    data, indices = _given(inputs[0], _FLOATS), _given(inputs[1], INT64)
    if attributes["axis"] == 0:
        _need(checker.name(inputs[1]) == "input_ids")
        _need(data.shape == (checker.facts.logits_size, checker.facts.hidden_size))
        return [Declared(data.dtype, (*indices.shape, _columns(data)))]
    _need(checker.name(inputs[1]) == "logit_rows" and data.shape[:2] == (1, "rows") and len(data.shape) == 3)
    return [Declared(data.dtype, (1, "logit_rows", _columns(data)))]


def _gather_blocks(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    rows, hidden = checker.facts.logits_size, checker.facts.hidden_size
    bits, block = int(attributes["bits"]), int(attributes["block_size"])
    _need(checker.name(inputs[1]) == "input_ids")
    blocks = -(-hidden // block)
    _given(inputs[0], UINT8, (rows, hidden * bits // 8))
    scale = _given(inputs[2], _FLOATS, (rows, blocks))
    if len(inputs) == 4:
        _given(inputs[3], UINT8, (rows, -(-blocks * bits // 8)))
    return [Declared(scale.dtype, (1, "rows", hidden))]


def _cast(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [Declared(int(attributes["to"]), _given(inputs[0], _FLOATS).shape)]


def _alike(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    return [_given(inputs[0], _FLOATS)]


def _broadcast(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    first = _given(inputs[0], _FLOATS)
    second = _given(inputs[1], first.dtype)
    last = first.shape[-1:]
    # The second never makes the first larger.
    _need(second.shape in (first.shape, (*first.shape[:-1], 1), last, (1,), ()))
    return [first]


def _norm(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _given(inputs[1], x.dtype, (_columns(x),))
    return [x]


def _skip_norm(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _given(inputs[1], x.dtype, x.shape)
    _given(inputs[2], x.dtype, (_columns(x),))
    statistic = Declared(FLOAT, (*x.shape[:-1], 1))
    return [x, statistic, statistic, x]


def _split(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    _need(_columns(x) % 2 == 0)
    return [Declared(x.dtype, (*x.shape[:-1], _columns(x) // 2))] * 2


def _matmul(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    weight = _given(inputs[1], x.dtype)
    _need(len(x.shape) == 3 and len(weight.shape) == 2 and weight.shape[0] == _columns(x))
    return [Declared(x.dtype, (*x.shape[:-1], _columns(weight)))]


def _matmul_blocks(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], _FLOATS)
    outputs, block = int(attributes["N"]), int(attributes["block_size"])
    blocks = -(-_columns(x) // block)
    _need(_columns(x) == attributes["K"] and len(x.shape) == 3)
    _given(inputs[1], UINT8, (outputs, blocks, block // 2))
    _given(inputs[2], x.dtype, (outputs, blocks))
    if len(inputs) == 4:
        _given(inputs[3], UINT8, (outputs, -(-blocks // 2)))
    return [Declared(x.dtype, (*x.shape[:-1], outputs))]


def _matmul_integers(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x, weight = _given(inputs[0], UINT8), _given(inputs[1], (UINT8, INT8))
    _need(len(x.shape) == 3 and len(weight.shape) == 2 and weight.shape[0] == _columns(x))
    _given(inputs[2], FLOAT, ())
    _given(inputs[3], FLOAT, (_columns(weight),))
    _given(inputs[4], UINT8, ())
    _given(inputs[5], weight.dtype, ())
    return [Declared(FLOAT, (*x.shape[:-1], _columns(weight)))]


def _quantize(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    _given(inputs[1], FLOAT, ())
    _given(inputs[2], UINT8, ())
    return [Declared(UINT8, x.shape)]


def _constant(checker: _Checker, value: Declared | None, number: int) -> None:
    _given(value, INT64, (1,))
    _need(checker.contents(value) == number.to_bytes(8, "little", signed=True))


def _maximum(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    _need(len(x.shape) == 3)
    _constant(checker, inputs[1], -1)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _first_column(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    x = _given(inputs[0], FLOAT)
    for value, number in zip(inputs[1:], (0, 1, -1), strict=True):
        _constant(checker, value, number)
    _need(len(x.shape) == 3)
    return [Declared(FLOAT, (*x.shape[:-1], 1))]


def _pad(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    _need([checker.name(value) for value in inputs[:2]] == ["tree_bias", "tree_bias_padding"] and inputs[2] is None)
    _constant(checker, inputs[3], 3)
    return [Declared(checker.float, (1, 1, "rows", "total"))]


def _attention(checker: _Checker, inputs: Inputs, attributes: Attributes) -> Sequence[Declared]:
    facts, dtype = checker.facts, checker.float
    _need((attributes["num_heads"], attributes["kv_num_heads"]) == (facts.heads, facts.kv_heads))
    _given(inputs[0], dtype, (1, "rows", (facts.heads + 2 * facts.kv_heads) * facts.head_size))
    _need(inputs[1] is None and inputs[2] is None)
    prefix, _, part = checker.name(inputs[3]).rpartition(".")
    _need(part == "key" and checker.name(inputs[4]) == f"{prefix}.value" and prefix.startswith("past_key_values."))
    _need([checker.name(value) for value in inputs[5:7]] == ["seqlens_k", "total_sequence_length"])
    for table in inputs[7:9]:
        # Rows are looked up by position, which the kernel does not compare with the table's length.
        rows, columns = _given(table, dtype).shape if len(_given(table, dtype).shape) == 2 else (0, 0)
        _need(isinstance(rows, int) and rows > checker.positions and columns == facts.head_size // 2)
    _need(len(inputs) == (14 if checker.quantized_cache else 11 if checker.tree else 9))
    _need(attributes.keys().isdisjoint(_CACHE_ATTRIBUTES) != checker.quantized_cache)
    if checker.quantized_cache:
        _need(attributes.keys() >= _CACHE_ATTRIBUTES.keys() and inputs[11] is None)
        for scales in inputs[12:]:
            _given(scales, FLOAT, (1, facts.kv_heads, 1, facts.head_size))
    if checker.tree:
        _need(checker.name(inputs[9]) == "position_ids")
        _given(inputs[10], dtype, (1, 1, "rows", "total"))
    return [Declared(dtype, (1, "rows", facts.heads * facts.head_size)), checker.cache, checker.cache]


# How keys and values are stored in 8 bits; together or not at all.
_CACHE_ATTRIBUTES: dict[str, Sequence[int | str]] = {
    "k_quant_type": ("PER_CHANNEL",),
    "v_quant_type": ("PER_CHANNEL",),
    "kv_cache_bit_width": (8,),
}

# Operators, their numbers of inputs and outputs, and the values their attributes may have.
_RULES: dict[tuple[str, str], _Rule] = {
    ("", "Gather"): _Rule((2,), 1, {"axis": (0, 1)}, _gather),
    ("", "Cast"): _Rule((1,), 1, {"to": _FLOATS}, _cast),
    ("", "Abs"): _Rule((1,), 1, {}, _alike),
    ("", "Sigmoid"): _Rule((1,), 1, {}, _alike),
    ("", "Add"): _Rule((2,), 1, {}, _broadcast),
    ("", "Mul"): _Rule((2,), 1, {}, _broadcast),
    ("", "Div"): _Rule((2,), 1, {}, _broadcast),
    ("", "RMSNormalization"): _Rule((2,), 1, {"axis": (-1,), "epsilon": float}, _norm),
    ("", "Split"): _Rule((1,), 2, {"axis": (-1,), "num_outputs": (2,)}, _split),
    ("", "MatMul"): _Rule((2,), 1, {}, _matmul),
    ("", "ReduceMax"): _Rule((2,), 1, {"keepdims": (1,)}, _maximum),
    ("", "Slice"): _Rule((4,), 1, {}, _first_column),
    ("", "Pad"): _Rule((4,), 1, {}, _pad),
    (_CONTRIB, "QuantizeLinear"): _Rule((3,), 1, {}, _quantize),
    (_CONTRIB, "MatMulIntegerToFloat"): _Rule((6,), 1, {}, _matmul_integers),
    (_CONTRIB, "SkipSimplifiedLayerNormalization"): _Rule((3,), 4, {"epsilon": float}, _skip_norm),
    (_CONTRIB, "MatMulNBits"): _Rule(
        (3, 4),
        1,
        {"K": int, "N": int, "bits": (4,), "block_size": _BLOCK_SIZES, "accuracy_level": (4,)},
        _matmul_blocks,
        optional=("accuracy_level",),
    ),
    (_CONTRIB, "GatherBlockQuantized"): _Rule(
        (3, 4),
        1,
        {"bits": (4, 8), "block_size": _BLOCK_SIZES, "gather_axis": (0,), "quantize_axis": (1,)},
        _gather_blocks,
    ),
    (_CONTRIB, "GroupQueryAttention"): _Rule(
        (9, 11, 14),
        3,
        {"num_heads": int, "kv_num_heads": int, "do_rotary": (1,), **_CACHE_ATTRIBUTES},
        _attention,
        optional=tuple(_CACHE_ATTRIBUTES),
    ),
}
