"""The engines of a benchmark: one for each mode, so that none profits from what another has learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from edge_spec.bench.measurement import Lane
from edge_spec.bench.modes import BASELINE, PLAIN, Mode, require_drafters
from edge_spec.errors import MemoryBudgetError
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.load import load

# Long enough that prefill runs in chunks, and repetitive enough that every drafter has something to propose.
_WARM_UP = "The first runner passes the baton to the second, the second passes the baton to the third. " * 5
_WARM_UP_TOKENS = 16


@contextmanager
def open_lanes(
    bundle: Path,
    modes: Sequence[Mode],
    baseline: Path | None,
    loading: Mapping[str, Any],
    options: Mapping[str, Any],
    shared: bool = False,
) -> Iterator[list[Lane]]:
    """Load and warm up what is compared; close it at the end.

    A drafter may learn from the answers it drafts for. In an engine of its own, a mode meets every prompt for the first
    time. Plain decoding teaches no drafter, so it runs in the engine of the first other mode.

    Args:
        bundle: the pair.
        modes: how it decodes; plain decoding among them.
        baseline: another bundle, to be decoded plainly.
        loading: arguments of :func:`edge_spec.load`.
        options: what every request asks for.
        shared: use one engine for all modes of a level of exactness, to save memory.

    Raises:
        EdgeSpecError: a bundle cannot be loaded or does not fit into memory, or a mode does not exist.
    """
    with ExitStack() as stack:

        def engine(path: Path, exactness: str | None) -> Engine:
            options = {**loading, **({"exactness": exactness} if exactness else {})}
            try:
                return stack.enter_context(load(path, **options))
            except MemoryBudgetError as error:
                raise MemoryBudgetError(
                    f"{error}\nOr compare fewer modes, let them share an engine (--shared-engine), or leave out the "
                    "baseline."
                ) from error

        engines: dict[str, Engine] = {}
        plain: dict[str | None, Engine] = {}  # by exactness
        for mode in sorted(modes, key=lambda mode: mode.speculation == PLAIN):
            reusable = mode.exactness in plain and (shared or mode.speculation == PLAIN)
            engines[mode.name] = plain[mode.exactness] if reusable else engine(bundle, mode.exactness)
            plain.setdefault(mode.exactness, engines[mode.name])
            require_drafters(modes, engines[mode.name].drafters)
        lanes = [Lane(mode, engines[mode.name]) for mode in modes]
        if baseline is not None:
            lanes.append(Lane(Mode(BASELINE), engine(baseline, None)))
        for lane in lanes:
            # Also the place where options that no engine takes are refused. A letter is a token at most.
            text = _WARM_UP[: max(lane.engine.context - _WARM_UP_TOKENS - 1, 1)]
            list(lane.stream(text, {**options, "max_new_tokens": min(_WARM_UP_TOKENS, options["max_new_tokens"])}))
        yield lanes
