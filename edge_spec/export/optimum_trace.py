"""A decoder's graph as optimum-onnx traces it: where its past goes, where its logits come from, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from edge_spec.errors import UnsupportedError

# What follows lm_head in some models (a bias, a factor, a soft limit) works on each row by itself.
_ROW_BY_ROW = ("Add", "Cast", "Div", "Identity", "Mul", "Sub", "Tanh")
_SKIPPED = ("Cast", "Identity")  # between a layer's Concat and the output


class TracedGraph:
    """What is to be known of such a graph before it is written anew.

    Attributes:
        slots: names of the caches, ``0.key`` and so on.
        new_rows: by slot, the rows that the graph puts behind the past.
        head: the product with lm_head, where it is certain that nothing but row-wise work follows; else ``None``.
    """

    def __init__(self, graph: ir.Graph, where: str) -> None:
        """Look at a graph; ``where`` names its model in errors.

        Raises:
            UnsupportedError: it has inputs or outputs that are not known, or uses its past otherwise than by joining
                new rows to it.
        """
        self._where = where
        self.inputs = {str(value.name): value for value in graph.inputs}
        self.outputs = {str(value.name): value for value in graph.outputs}
        self.opset = graph.opset_imports.get("", 0)
        layers = sum(name.startswith("past_key_values.") for name in self.inputs) // 2
        self.slots = tuple(f"{layer}.{part}" for layer in range(layers) for part in ("key", "value"))
        needed = {"input_ids", *(f"past_key_values.{slot}" for slot in self.slots)}
        if not layers or not needed <= self.inputs.keys() <= needed | {"attention_mask", "position_ids"}:
            raise self.unsupported(f"its inputs are {', '.join(self.inputs)}")
        if self.outputs.keys() != {"logits", *(f"present.{slot}" for slot in self.slots)}:
            raise self.unsupported(f"its outputs are {', '.join(self.outputs)}")
        shapes = {self._dimensions(self.inputs[f"past_key_values.{slot}"])[1::2] for slot in self.slots}
        sizes = next(iter(shapes))
        if len(shapes) > 1 or len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
            raise self.unsupported("its layers have caches of different sizes")
        self.kv_heads, self.head_size = (int(size) for size in sizes)
        self.logits_size = int(self._dimensions(self.outputs["logits"])[-1])
        self.new_rows = {slot: self._rows_behind(slot) for slot in self.slots}
        self.head = self._find_head()

    def unsupported(self, why: str) -> UnsupportedError:
        """An error that says so."""
        return UnsupportedError(f"{self._where} cannot be used as optimum-onnx exports it: {why}")

    def needed_nodes(self) -> Iterator[ir.Node]:
        """The nodes on which logits and new rows depend, in their order."""
        open_values = [self.outputs["logits"], *self.new_rows.values()]
        needed: set[ir.Node] = set()
        while open_values:
            node = open_values.pop().producer()
            if node is not None and node not in needed:
                needed.add(node)
                open_values += [value for value in node.inputs if value is not None]
        graph = self.outputs["logits"].graph
        assert graph is not None  # it is an output of one
        return (node for node in graph if node in needed)

    def _rows_behind(self, slot: str) -> ir.Value:
        past, present = self.inputs[f"past_key_values.{slot}"], self.outputs[f"present.{slot}"]
        users = [use.node for use in past.uses() if use.node.op_type != "Shape"]
        whole: ir.Value | None = present
        while whole is not None and (node := whole.producer()) is not None and node.op_type in _SKIPPED:
            whole = node.inputs[0]
        joined = users[0] if len(users) == 1 else None
        if joined is None or joined.op_type != "Concat" or len(joined.inputs) != 2 or whole is not joined.outputs[0]:
            raise self.unsupported(f"it does not join past_key_values.{slot} and the new rows to present.{slot}")
        rows = joined.inputs[1]
        if joined.inputs[0] is not past or rows is None or joined.attributes["axis"].as_int() not in (2, -2):
            raise self.unsupported(f"it does not put the new rows behind past_key_values.{slot}")
        return rows

    def _find_head(self) -> ir.Node | None:
        value = self.outputs["logits"]
        while (node := value.producer()) is not None:
            if node.op_type == "MatMul":
                weight = constant(node.inputs[1])
                return node if weight is not None and len(weight.shape) == 2 else None
            varying = [x for x in node.inputs if x is not None and not _is_vector(constant(x))]
            if node.op_type not in _ROW_BY_ROW or len(varying) != 1 or len(varying[0].uses()) != 1:
                return None
            value = varying[0]
        return None

    @staticmethod
    def _dimensions(value: ir.Value) -> tuple[int | str, ...]:
        shape = () if value.shape is None else value.shape
        return tuple(size if isinstance(size, int) else str(size) for size in shape)


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind a value that is always the same; ``None`` for others."""
    return None if value is None else ir.convenience.get_const_tensor(value)


def _is_vector(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and len(tensor.shape) < 2
