"""What is told of prompts to whoever records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Recorder(Protocol):
    """Keeps prompts; called from several threads."""

    def record(self, prompt_or_messages: str | Sequence[Any], options: Mapping[str, Any]) -> None:
        """Keep a prompt and the options of :meth:`edge_spec.Engine.stream` that it came with. Must not raise."""
        ...
