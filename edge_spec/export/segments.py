"""A written graph cut into segments that run one after the other, so that only one's weights are in memory at a time.

A cut goes between two nodes; what the first ones computed and the later ones read is handed over. No node changes, and
the weights stay where they are, so the segments compute what the whole graph computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

# The names of the nodes that a segment may begin with: the first one of a decoder layer, and the norm before lm_head.
# ONNX Runtime fuses nodes, but never across these places, so cutting there changes nothing that is computed.
_PART = re.compile(r"layers\.\d+\.|final_norm")


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph.

    Attributes:
        nodes: in the order of the graph.
        graph_inputs: the graph's inputs that they read.
        handed: values of earlier segments that they read.
        outputs: what they compute of the graph's outputs and of what later segments read.
        kept: those values, of this segment or an earlier one, that later segments read.
    """

    nodes: Sequence[onnx.NodeProto]
    graph_inputs: tuple[str, ...]
    handed: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: frozenset[str]


class SegmentedGraph:
    """The segments of one graph, each of which can be made a model of its own.

    Attributes:
        inputs, outputs: the graph's own, by name.
        segments: in the order in which they must run.
    """

    def __init__(self, path: Path, largest: int) -> None:
        """Read a written graph without its weights.

        Args:
            path: the graph, its weights in a file beside it.
            largest: bytes of weights up to which neighbouring layers share a segment.
        """
        self._model = onnx.load(str(path), load_external_data=False)
        graph = self._model.graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name: value for value in graph.output}
        self.segments = tuple(self._cut(list(self._groups(largest))))

    def model(self, segment: Segment, values: Mapping[str, npt.NDArray[Any]]) -> onnx.ModelProto:
        """Return a segment as a model for the folder of the graph; ``values`` holds what is handed to it."""
        read = {name for node in segment.nodes for name in node.input}
        handed = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
            )
            for name in segment.handed
        ]
        graph = onnx.helper.make_graph(
            segment.nodes,
            "segment",
            [*(self.inputs[name] for name in segment.graph_inputs), *handed],
            # What lies inside the graph has no declared type; ONNX Runtime infers it.
            [self.outputs.get(name, onnx.ValueInfoProto(name=name)) for name in segment.outputs],
            [tensor for name, tensor in self._initializers.items() if name in read],
        )
        return onnx.helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)

    def _groups(self, largest: int) -> Iterator[list[onnx.NodeProto]]:
        """Yield the nodes of each segment: as many parts of the graph as have at most ``largest`` bytes together."""
        group: list[onnx.NodeProto] = []
        group_bytes = 0
        for part in self._parts():
            names = {name for node in part for name in node.input}
            part_bytes = sum(_bytes(tensor) for name, tensor in self._initializers.items() if name in names)
            if group and group_bytes + part_bytes > largest:
                yield group
                group, group_bytes = [], 0
            group += part
            group_bytes += part_bytes
        yield group

    def _parts(self) -> Iterator[list[onnx.NodeProto]]:
        part: list[onnx.NodeProto] = []
        name = ""
        for node in self._model.graph.node:
            match = _PART.match(node.name)
            if match and match[0] != name:
                name = match[0]
                yield part
                part = []
            part.append(node)
        yield part

    def _cut(self, groups: Sequence[Sequence[onnx.NodeProto]]) -> Iterator[Segment]:
        reads = [{name for node in nodes for name in node.input} for nodes in groups]
        known: set[str] = set()
        for index, nodes in enumerate(groups):
            later = set().union(*reads[index + 1 :])
            made = [name for node in nodes for name in node.output if name]
            handed = tuple(sorted(reads[index] & known))
            known.update(made)
            yield Segment(
                nodes=nodes,
                graph_inputs=tuple(name for name in self.inputs if name in reads[index]),
                handed=handed,
                outputs=tuple(name for name in made if name in later or name in self.outputs),
                kept=frozenset(known & later),
            )


def _bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of an initializer's data, wherever it lies."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)
    return int(tensor.ByteSize())
