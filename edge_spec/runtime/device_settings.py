"""How a model uses the device that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# How a value that does not own its memory can be made from Python. Not every build has DLPack, and whether ONNX Runtime
# takes such a value for one on the right device has to be tried.
Lending = Literal["dlpack", "binding"]

# What a lack of them is called.
CUDA_GRAPHS = "CUDA graphs"


@dataclass(frozen=True)
class DeviceSettings:
    """What of a device is used.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``, where the KV cache lies, and inputs and logits if they are ``resident``.
        resident: whether inputs and logits lie on the device and are updated there.
        captures: whether calls of a few fixed shapes are captured as CUDA graphs and replayed. Needs ``resident``.
        tree_graph: whether a graph for trees is opened beside one for chains only. Needs ``resident``.
        shares_weights: whether the sessions of one model use the same weights, which then lie beside their arenas.
        lending: how they are given to both.
        options: of the CUDA provider.
        lacks: what does not work on this device, and why.
        profile: what the names of ONNX Runtime's profiles begin with, one for each session; ``None`` writes none.
    """

    name: str = "cpu"
    resident: bool = False
    captures: bool = False
    tree_graph: bool = False
    shares_weights: bool = False
    lending: Lending = "dlpack"
    options: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    profile: str | None = None

    @property
    def eager_reason(self) -> str | None:
        """Why no calls are captured here, as far as it is a lack of the device's."""
        return next((lack for lack in self.lacks if lack.startswith(CUDA_GRAPHS)), None)

    def without_graphs(self, reason: str) -> DeviceSettings:
        """The same where it has turned out that calls are not captured."""
        return replace(self, captures=False, lacks=(*self.lacks, f"{CUDA_GRAPHS}: {reason}"))
