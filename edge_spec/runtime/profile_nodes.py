"""What a profile of ONNX Runtime tells: which nodes ran where, and which only copied between devices."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# ONNX Runtime inserts these where a value lies on another device than the kernel that reads it.
_COPIES = ("MemcpyToHost", "MemcpyFromHost")


@dataclass(frozen=True)
class ProfiledNodes:
    """The nodes of a profile.

    Attributes:
        providers: how many nodes each execution provider ran, copies aside.
        elsewhere: operators that ran on another provider than the first one asked for, with how many nodes of each.
        copies: names of the nodes that copy between devices. A graph with any cannot be captured.
    """

    providers: dict[str, int]
    elsewhere: dict[str, int]
    copies: tuple[str, ...]


def read_profile(file: Path, provider: str) -> ProfiledNodes:
    """Read a profile as ``InferenceSession.end_profiling`` writes it; a node that ran often counts once.

    Args:
        file: the profile.
        provider: the execution provider that was to do the work.

    Raises:
        ValueError: it is no profile.
    """
    try:
        events = json.loads(file.read_text("utf-8"))
        nodes = {
            event["name"]: event["args"]
            for event in events
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
        }
        kinds = {name: (str(about["op_name"]), str(about["provider"])) for name, about in nodes.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no profile of ONNX Runtime ({error!r}).") from error
    copies = sorted(name.removesuffix("_kernel_time") for name, (kind, _) in kinds.items() if kind in _COPIES)
    others = [(kind, where) for kind, where in kinds.values() if kind not in _COPIES]
    return ProfiledNodes(
        dict(Counter(where for _, where in others)),
        dict(Counter(kind for kind, where in others if where != provider)),
        tuple(copies),
    )
