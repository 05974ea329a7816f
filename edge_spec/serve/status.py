"""What ``/status`` says of a server: its model, its memory, its queue and what it has done."""

from __future__ import annotations

from typing import Any

from edge_spec.runtime.engine import Engine
from edge_spec.runtime.memory_profile import resident_memory
from edge_spec.serve.fair_queue import FairQueue


def engine_status(engine: Engine, model: str) -> dict[str, Any]:
    """Describe the engine; takes a while, so it is no work for the event loop."""
    return {
        "model": model,
        "exactness": engine.exactness,
        "drafters": list(engine.drafters),
        "context": engine.context,
        "plan": {
            "total_bytes": engine.plan.total_bytes,
            "budget_bytes": engine.plan.budget_bytes,
            "parts": [{"name": item.name, "bytes": item.bytes} for item in engine.plan.budgeted],
        },
        "memory": memory(engine),
        "statistics": engine.statistics().to_dict(),
    }


def queue_status(queue: FairQueue) -> dict[str, int]:
    """Describe the queue."""
    return {"running": queue.running, "waiting": queue.waiting, "limit": queue.limit}


def memory(engine: Engine) -> dict[str, int | None]:
    """Memory of the process now, and as planned, in bytes."""
    return {"resident_bytes": resident_memory(), "planned_bytes": engine.plan.process_bytes}
