"""What a benchmark is to measure, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        bundle: the pair.
        modes: as for :func:`edge_spec.bench.modes.parse_modes`.
        prompts: file of prompts; ``None`` takes those that come with edge-spec.
        replay: log of prompts instead.
        category: measure only these; none takes all.
        per_category: most prompts of each category; ``None`` takes all.
        turns: turns of each prompt to use.
        repeat: passes over the prompts, each with engines that know none of them.
        max_new_tokens: longest answer, where a log does not say it.
        temperature, seed: 0 always takes the likeliest token; above, each prompt has its own seed, from ``seed`` on.
            Where a log says otherwise, that holds.
        baseline: another bundle, to be decoded plainly.
        device, memory_budget, kv, drafter, context, threads, exactness: as for :func:`edge_spec.load`; ``None``: its
            default.
        shared_engine: one engine for all modes, to save memory.
        output: folder for the report; ``None`` writes none.
    """

    bundle: Path
    modes: str = "auto"
    prompts: Path | None = None
    replay: Path | None = None
    category: Sequence[str] = ()
    per_category: int | None = None
    turns: int = 1
    repeat: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    baseline: Path | None = None
    device: str | None = None
    memory_budget: str | None = None
    kv: str | None = None
    drafter: str | None = None
    context: int | None = None
    threads: int | None = None
    exactness: str | None = None
    shared_engine: bool = False
    output: Path | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "repeat", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}, expected at least 1.")
        if self.prompts is not None and self.replay is not None:
            raise RequestError("prompts and replay are both given, expected one of them.")

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of :func:`edge_spec.load` that were given."""
        names = ("device", "memory_budget", "kv", "drafter", "context", "threads", "exactness")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """What every request asks for, if its prompt asks for nothing else."""
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "seed": self.seed}
