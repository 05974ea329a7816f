"""Answers as a benchmark records them, with costs chosen by hand."""

from __future__ import annotations

from typing import Any

from edge_spec.bench.measurement import Answer


def answer(mode: str, line: int = 1, *, decode: float = 1.0, tokens: int = 10, **changes: Any) -> Answer:
    """An answer whose first round took half a second for one token, and whose other tokens took ``decode`` seconds.

    Its wall clock shows a quarter of a second more. ``changes`` replace attributes and statistics.
    """
    attributes: dict[str, Any] = {
        "line": line,
        "question": str(line),
        "category": "qa",
        "turn": 0,
        "repetition": 0,
        "mode": mode,
        "place": 0,
        "wall_seconds": 0.75 + decode,
        "finish_reason": "length",
        "identical": None if mode == "baseline" else True,
    }
    statistics: dict[str, Any] = {
        "new_tokens": tokens + 1,
        "first_round_tokens": 1,
        "rounds": tokens + 1,
        "drafted": 0,
        "accepted": 0,
        "drafted_by_position": [],
        "accepted_by_position": [],
        "ttft_seconds": 0.5,
        "draft_seconds": 0.0,
        "verify_seconds": 0.5 + decode,
        "overhead_seconds": 0.0,
        "total_seconds": 0.5 + decode,
    }
    for name, value in changes.items():
        (attributes if name in attributes else statistics)[name] = value
    return Answer(**attributes, statistics=statistics)
