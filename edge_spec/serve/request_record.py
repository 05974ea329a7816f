"""What happened to one request: a line of the log, and what the metrics count."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_spec.runtime.completion import Completion
from edge_spec.serve.job import Times


@dataclass
class RequestRecord:
    """What happened to one request.

    Attributes:
        method, path: what was called.
        id: a name for it in the log.
        client: who called.
        status: of the answer; ``None`` if the client was gone before there was one.
        error: the code or message of an error.
        completions: what was generated.
        times: when what happened to it in the engine; ``None`` if it did not get that far.
        gone: whether the client left before the end.
        speculation: who drafted, as the request has it.
        prompt: what was asked, where it is to be logged.
    """

    method: str
    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    client: str = ""
    status: int | None = None
    error: str | None = None
    completions: Sequence[Completion] = ()
    times: Times | None = None
    gone: bool = False
    speculation: str | None = None
    prompt: Any = None
    started: float = field(default_factory=time.monotonic)

    @property
    def waiting_seconds(self) -> float | None:
        """From its arrival to its turn."""
        times = self.times
        return None if times is None or times.began is None else times.began - times.arrived

    @property
    def ttft_seconds(self) -> float | None:
        """From its arrival to its first token."""
        times = self.times
        return None if times is None or times.first_token is None else times.first_token - times.arrived

    def fields(self) -> dict[str, Any]:
        """Return what the log says of it. Prompt and answers are there only if ``prompt`` was set."""
        statistics = [completion.statistics for completion in self.completions]
        drafted = sum(one.drafted for one in statistics)
        rounds = sum(one.rounds for one in statistics)
        new_tokens = sum(one.new_tokens for one in statistics)
        accepted = sum(one.accepted for one in statistics)
        fields: dict[str, Any] = {
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "error": self.error,
            "gone": self.gone or None,
            "seconds": round(time.monotonic() - self.started, 4),
        }
        if statistics:
            fields |= {
                "prompt_tokens": statistics[0].prompt_tokens,
                "reused_tokens": statistics[0].reused_tokens,
                "new_tokens": new_tokens,
                "finish_reason": self.completions[-1].finish_reason,
                "speculation": self.speculation,
                "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
                "mean_accepted_length": round(new_tokens / rounds, 3) if rounds else None,
                "tokens_per_second": round(statistics[-1].tokens_per_second, 2),
                "seed": statistics[0].seed,
            }
        if self.times is not None:
            fields |= {"waiting_seconds": _rounded(self.waiting_seconds), "ttft_seconds": _rounded(self.ttft_seconds)}
        if self.prompt is not None:
            fields |= {"prompt": self.prompt, "texts": [completion.text for completion in self.completions]}
        return {name: value for name, value in fields.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
