"""Whether CUDA computes what the CPU does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.runtime.model import Model
from edge_spec.runtime.proposal import Proposal
from gpu_checks.check import Finding

Float32Array = npt.NDArray[np.float32]

_TOKENS = 48
# A branch beside a chain of four, behind the last token.
_TREE = Proposal((11, 12, 13, 14, 15, 16), parents=(-1, 0, 1, 2, -1, 4))


def chain_logits(model: Model, tokens: Sequence[int]) -> Float32Array:
    """Logits of every token, read in calls of several widths."""
    model.cache.rollback(0)
    rows: list[Float32Array] = []
    for start, stop in ((0, 30), (30, 31), (31, 40), (40, len(tokens))):
        rows += [np.array(row) for row in model.forward(tokens[start:stop], range(stop - start))]
    return np.stack(rows)


def tree_logits(model: Model, tokens: Sequence[int]) -> Float32Array:
    """Logits of a tree behind the tokens."""
    model.cache.rollback(0)
    model.prefill(tokens[:-1])
    past = len(tokens) - 1
    positions = [past, *(past + depth for depth in _TREE.depths)]
    rows = model.forward([tokens[-1], *_TREE.tokens], range(1 + len(_TREE)), positions, _TREE.ancestry())
    return np.stack([np.array(row) for row in rows])


def compare(what: str, found: Float32Array, expected: Float32Array, most: float) -> Finding:
    """Compare rows of logits by their distance, as a share of how far the expected ones spread."""
    off = float(np.abs(found - expected).max() / expected.std())
    same = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
    sound = bool(np.isfinite(found).all()) and off <= most
    details: dict[str, Any] = {"largest": off, "same_likeliest": same}
    return Finding.judged(
        what, f"off by {off:.4f} of the spread, same likeliest token {same:.0%}", f"at most {most}", sound, details
    )


def check_parity(cuda: Model, cpu: Model, exact: Model, columns: int) -> Iterator[Finding]:
    """Compare a target on CUDA with the same graph on the CPU, and with itself in float32.

    Args:
        cuda: a target.
        cpu: the same on the CPU.
        exact: the target in float32.
        columns: ids to draw a text from.
    """
    tokens = np.random.default_rng(0).integers(0, columns, _TOKENS).tolist()
    chain = chain_logits(cuda, tokens)
    yield compare("chain: CUDA against the CPU, same graph", chain, chain_logits(cpu, tokens), 0.1)
    expected = chain_logits(exact, tokens)
    off, weights = (np.abs(rows - expected).mean() / expected.std() for rows in (chain, chain_logits(cpu, tokens)))
    yield Finding.judged(
        "chain: CUDA against float32 weights",
        f"mean distance {off:.4f}, of the CPU with the same weights {weights:.4f}",
        "no more than the weights' own, half as much again",
        bool(off <= 1.5 * weights),
    )
    if not cuda.takes_trees:
        yield Finding("tree: CUDA against the CPU", "no tree graph is used", verdict="not run")
        return
    yield compare("tree: CUDA against the CPU, same graph", tree_logits(cuda, tokens), tree_logits(cpu, tokens), 0.1)
