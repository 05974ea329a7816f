"""Tells an ONNX Runtime that found no memory from one that failed otherwise, and says so with the plan."""

from __future__ import annotations

from collections.abc import Iterator

from edge_spec.errors import MemoryBudgetError
from edge_spec.runtime.graph_session import is_out_of_memory, said
from edge_spec.runtime.memory_plan import MemoryPlan


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, means that there was no memory."""
    kinds = MemoryError | MemoryBudgetError
    return any(isinstance(cause, kinds) or is_out_of_memory(cause) for cause in _causes(error))


def loading_failure(plan: MemoryPlan, error: BaseException) -> MemoryBudgetError:
    """The error of a load that fits its plan, but not what there was."""
    first = list(_causes(error))[-1]
    return MemoryBudgetError(
        f"There was no memory to load this bundle as planned ({said(first) or 'no memory'}):\n{plan}\n"
        "Something else has taken memory meanwhile, or the plan is off on this device. Free some, or give a smaller "
        "budget (memory_budget, --memory-budget), with which less is planned."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from, at most a few steps back."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
