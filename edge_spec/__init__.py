"""Lossless speculative decoding for small machines, on ONNX Runtime.

The public surface is what ``__all__`` names. It is imported on first use, so that ``import edge_spec`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.errors import EdgeSpecError, LogitsError, MemoryBudgetError
    from edge_spec.prompt_record import PromptRecorder
    from edge_spec.runtime.completion import Chunk, Completion
    from edge_spec.runtime.drafters.protocol import Budget, Drafter, Outcome
    from edge_spec.runtime.engine import Engine
    from edge_spec.runtime.engine_statistics import EngineStatistics
    from edge_spec.runtime.grammar import Grammar
    from edge_spec.runtime.load import load
    from edge_spec.runtime.logits_processors import LogitsProcessor
    from edge_spec.runtime.logprobs import TokenLogprobs
    from edge_spec.runtime.proposal import Proposal
    from edge_spec.runtime.sampling_params import SamplingParams
    from edge_spec.runtime.session import Session
    from edge_spec.runtime.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Chunk",
    "Completion",
    "Drafter",
    "EdgeSpecError",
    "Engine",
    "EngineStatistics",
    "Grammar",
    "LogitsError",
    "LogitsProcessor",
    "MemoryBudgetError",
    "Outcome",
    "PromptRecorder",
    "Proposal",
    "SamplingParams",
    "Session",
    "Statistics",
    "TokenLogprobs",
    "load",
]

_HOMES = {
    "Budget": "edge_spec.runtime.drafters.protocol",
    "Chunk": "edge_spec.runtime.completion",
    "Completion": "edge_spec.runtime.completion",
    "Drafter": "edge_spec.runtime.drafters.protocol",
    "EdgeSpecError": "edge_spec.errors",
    "Engine": "edge_spec.runtime.engine",
    "EngineStatistics": "edge_spec.runtime.engine_statistics",
    "Grammar": "edge_spec.runtime.grammar",
    "LogitsError": "edge_spec.errors",
    "LogitsProcessor": "edge_spec.runtime.logits_processors",
    "MemoryBudgetError": "edge_spec.errors",
    "Outcome": "edge_spec.runtime.drafters.protocol",
    "PromptRecorder": "edge_spec.prompt_record",
    "Proposal": "edge_spec.runtime.proposal",
    "SamplingParams": "edge_spec.runtime.sampling_params",
    "Session": "edge_spec.runtime.session",
    "Statistics": "edge_spec.runtime.statistics",
    "TokenLogprobs": "edge_spec.runtime.logprobs",
    "load": "edge_spec.runtime.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
