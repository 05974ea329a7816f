"""Whether speculation can be bitwise exact on this machine: measured, not assumed.

Speculative output equals plain output bit for bit if a row's logits do not depend on the rows it travels with. That is
a property of kernels, which differ between processors, providers and versions, so the engine runs the same tokens
through the target in calls of several widths and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_spec.errors import ProviderError
from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Proposal

Exactness = Literal["bitwise", "distribution"]

# Rows of every target call where kernels leave no other way to bitwise exactness: a round's usual width.
FIXED_ROWS = 8

# Widths that a round can have: a plain step (padded), a short proposal and a long one. With a tree behind them, all of
# it is 14 target calls, and on devices three times as many.
_WIDTHS = (1, 2, 5)
_ROWS = 6
_CACHED = 11
# On devices attention divides the past among its threads by how long it is told that it is; between the smallest
# buckets (see shape_grid) that changes within one call.
_FAR_CACHED = (254, 510)


def load_at_level(
    load: Callable[[int | None], Model], wanted: Exactness | None, vocab_size: int
) -> tuple[Model, Exactness]:
    """Load a target and find out which level holds with it.

    Args:
        load: loads the target, given the fixed width of its calls; ``None`` lets them be as wide as they come.
        wanted: ``"bitwise"`` goes to a fixed width if need be; ``"distribution"`` measures nothing; ``None`` takes
            what holds by itself.
        vocab_size: ids that may be fed.

    Raises:
        ProviderError: ``wanted`` is ``"bitwise"``, and not even calls of one width give it.
    """
    target = load(None)
    if wanted == "distribution":
        return target, "distribution"
    level = measure_exactness(target, vocab_size)
    if wanted is None or level == "bitwise":
        return target, level
    del target  # two at once might not fit the memory
    target = load(FIXED_ROWS)
    if measure_exactness(target, vocab_size) != "bitwise":
        raise ProviderError(
            "exactness='bitwise' cannot hold on this device: a row's logits depend on the rows it travels with, even "
            f"where every call has {FIXED_ROWS} rows. Load with exactness='distribution'."
        )
    return target, "bitwise"


def measure_exactness(target: Model, vocab_size: int) -> Exactness:
    """Compare rows computed in calls of several widths.

    A graph for trees apart, as on CUDA, has kernels of its own. Where calls without branches keep the bits and its
    calls do not, the bits are dearer: that graph is closed, and proposals are chains.

    Args:
        target: a model whose cache is empty, and is empty again afterwards.
        vocab_size: ids that may be fed.

    Returns:
        ``"bitwise"`` if every row came out the same bit for bit, else ``"distribution"``.
    """
    try:
        for cached in (_CACHED,) if target.moves_slots else (_CACHED, *_FAR_CACHED):
            level = _measure_behind(target, vocab_size, cached)
            if level != "bitwise":
                return level
    finally:
        target.cache.rollback(0)
    return "bitwise"


def _measure_behind(target: Model, vocab_size: int, most_cached: int) -> Exactness:
    """Compare behind so many cached tokens, or as many as the context has room for."""
    # A context too small for all of it is measured as far as it reaches, with at least one token in the cache.
    count = min(most_cached + _ROWS, target.context)
    tokens = np.random.default_rng(0).integers(0, vocab_size, count).tolist()
    cached, rows = tokens[: max(1, count - _ROWS)], tokens[max(1, count - _ROWS) :]
    target.cache.rollback(0)
    target.prefill(cached)
    expected = np.array(target.forward(rows, range(len(rows))))
    for width in _WIDTHS:
        target.cache.rollback(len(cached))
        for start in range(0, len(rows), width):
            call = rows[start : start + width]
            logits = target.forward(call, range(len(call)))
            if not np.array_equal(logits, expected[start : start + len(call)]):
                return "distribution"
    if target.takes_trees and not _trunk_is_unmoved(target, cached, rows, expected):
        if not target.trees_apart:
            return "distribution"
        target.drop_trees()
    return "bitwise"


def _trunk_is_unmoved(target: Model, cached: list[int], rows: list[int], expected: npt.NDArray[np.float32]) -> bool:
    """Whether the rows come out the same with a branch behind them, which they do not see."""
    count = min(len(rows), target.widest_tree, target.context - len(cached) - 1)
    if count < 2:
        return True
    tree = Proposal((*rows[1:count], rows[0]), parents=(*range(-1, count - 2), -1))
    target.cache.rollback(len(cached))
    positions = [len(cached), *(len(cached) + depth for depth in tree.depths)]
    logits = target.forward([rows[0], *tree.tokens], range(count), positions, tree.ancestry())
    return np.array_equal(logits, expected[:count])
