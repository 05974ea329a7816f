"""Which CUDA graph is replayed for whom, and how calls go on once one of them failed."""

from __future__ import annotations

from typing import Any

from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.graph_session import GraphSession, is_out_of_memory, said

# Graphs of one model. Each takes some memory for its nodes, and ONNX Runtime gives none of them back.
_MOST_GRAPHS = 128


class CapturedCalls:
    """Hands out the numbers by which ONNX Runtime knows captured graphs, and runs calls by them.

    A number belongs to one set of buffers, since the graph knows their addresses, and is never used for another.

    Attributes:
        reason: why no more graphs are captured; ``None`` while there is none.
    """

    def __init__(self, most: int = _MOST_GRAPHS) -> None:
        """Start without graphs, of which there may ever be so many."""
        self.reason: str | None = None
        self._most = most
        self._count = 0
        self._failed = False

    @property
    def count(self) -> int:
        """Graphs that were numbered so far."""
        return self._count

    def number(self, shape: CallShape) -> int | None:
        """A number for the graph of a call with new buffers; ``None`` if that call runs without."""
        if self.reason is not None or shape.total is None or not shape.logit_rows:
            return None
        if self._count == self._most:
            self.reason = f"{self._most} CUDA graphs are captured, and no more are kept"
            return None
        self._count += 1  # 0 is ONNX Runtime's own number, for calls that name none
        return self._count

    def run(self, session: GraphSession, binding: Any, graph: int | None) -> None:
        """Run what is bound: by its graph, or without once a call with a graph has failed but for want of memory.

        Args:
            session: of the binding.
            binding: with inputs that are filled in.
            graph: the number of its graph; ``None`` if it has none.

        Raises:
            Exception: whatever ONNX Runtime raises without a graph.
        """
        if graph is not None and not self._failed:
            try:
                session.run(binding, graph)
                return
            except Exception as error:  # ONNX Runtime raises classes of its own that share no base below Exception
                if not is_out_of_memory(error):  # which says nothing against graphs
                    self._failed = True
                    self.reason = f"a call failed with a CUDA graph: {said(error)}"
        session.run(binding)
