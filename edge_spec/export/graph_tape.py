"""A graph while it is written: its inputs, constants and nodes, in the compute type of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from edge_spec.export.recipe import Device

CONTRIB = "com.microsoft"

_OPSETS = {"": 23, CONTRIB: 1}
_IR_VERSION = 11

Attributes = Mapping[str, int | float | str]


def compute_type(device: Device) -> ir.DataType:
    """float32 on CPU and float16 on CUDA."""
    return ir.DataType.FLOAT if device == "cpu" else ir.DataType.FLOAT16


class GraphTape:
    """Records nodes in their order.

    Attributes:
        device: what the graph runs on.
        dtype: its compute type.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.dtype = compute_type(device)
        self._tape = Tape()
        self._inputs: dict[str, ir.Value] = {}
        self._weights: dict[str, ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Return an input of the graph, which has it once, however often it is asked for."""
        if name not in self._inputs:
            self._inputs[name] = describe(ir.Value(), name, dtype, shape)
        return self._inputs[name]

    def weight(self, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
        """Return the value of a stored tensor, which lies in the graph once, however often it is asked for."""
        name = name or tensor.name
        assert name is not None  # all stored tensors have one
        if name not in self._weights:
            self._weights[name] = self._tape.initializer(tensor, name)
        return self._weights[name]

    def constant(self, name: str, value: np.generic | np.ndarray) -> ir.Value:
        """Return a constant, which lies in the graph once, however often it is asked for."""
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.tensor(np.asarray(value), name=name))
        return self._constants[name]

    def number(self, value: float) -> np.generic:
        """Return a scalar of the compute type."""
        return np.float32(value) if self.dtype == ir.DataType.FLOAT else np.float16(value)

    def op(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes | None = None,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        """Add a node with one output."""
        return self._tape.op(kind, list(inputs), attributes, domain=domain, name=name)

    def multi(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes,
        outputs: int,
        domain: str = "",
        name: str | None = None,
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        return self._tape.op_multi_out(kind, list(inputs), attributes, num_outputs=outputs, domain=domain, name=name)

    def finish(self, outputs: Sequence[ir.Value]) -> ir.Model:
        """Return everything as a model with these outputs."""
        graph = ir.Graph(
            list(self._inputs.values()),
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports=_OPSETS,
            name="decoder",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edge-spec")


def describe(value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Give a value its name, type and shape, and return it."""
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
