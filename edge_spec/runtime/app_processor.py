"""An app's own change to the logits: what it must be, and what is asked of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError, RequestError


class LogitsProcessor(Protocol):
    """An app's own rule for the next token, such as a list of words to avoid.

    It must be a pure function of its two arguments. Speculation asks about texts that are only drafted: it is called
    for paths that are then rejected, again for a path that was rejected before, and for the nodes of a tree in any
    order. A processor that kept state, such as how often it was called, would answer differently with speculation on
    than off, and the text would show it. What depends on the text so far is to be computed from ``token_ids``;
    memory of earlier answers, keyed by those tokens, is fine.

    It is never called for a text that it ruled out itself: behind a drafted token whose logit is -inf, no row is
    processed.
    """

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32], /) -> NDArray[np.float32]:
        """Return the logits to go on with.

        Args:
            token_ids: prompt and output up to the token in question, drafted ones included; the processor's own copy.
            logits: float32 [vocab], the processor's own copy, which it may change and return.

        Returns:
            Floating point [vocab]; -inf excludes a token. None is NaN or +inf.
        """
        ...


def run_processor(
    processor: LogitsProcessor, token_ids: list[int], logits: NDArray[np.float32], row: int
) -> NDArray[np.floating[Any]]:
    """Let a processor change a row, float32 [vocab], of its own; raise LogitsError if it fails or returns no logits."""
    shape, position = logits.shape, len(token_ids)
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    try:
        returned = np.asarray(processor(token_ids, logits))
    except Exception as error:
        raise LogitsError(f"the logits processor {name} raised {error!r}", row, position) from error
    if returned.shape != shape or returned.dtype.kind != "f":
        raise LogitsError(
            f"the logits processor {name} returned {returned.dtype} {list(returned.shape)}, expected floating point "
            f"{list(shape)}",
            row,
            position,
        )
    peak = float(returned.max())
    if np.isnan(peak) or peak > float(np.finfo(np.float32).max):
        raise LogitsError(
            f"the logits processor {name} returned logits up to {peak}, expected finite ones (or -inf)", row, position
        )
    return returned


def checked_processors(processors: Iterable[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """What a request gave, as a tuple. Raises RequestError if it holds anything but functions."""
    given: object = processors
    if not isinstance(given, Iterable):
        raise RequestError(f"logits_processors is {given!r}, expected a sequence of functions")
    checked = tuple(given)
    for processor in checked:
        if not callable(processor):
            raise RequestError(
                f"logits_processors holds {processor!r}, expected functions of token ids and logits that return logits"
            )
    return checked
