"""Token recycling: propose what the target thought likely the last time, including what it then did not say."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_spec.runtime.candidate_tree import lay_out, trunk_first
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.protocol import Budget, Outcome
from edge_spec.runtime.logit_rows import SelectedRows
from edge_spec.runtime.proposal import Evidence, Proposal

_WIDTH = 8  # successors kept of each row of logits
_SLOT_BITS = 15
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads keys evenly (Fibonacci hashing)
_WORD = 2**64 - 1

# Rows are searched by columns of this many logits. More would cost memory traffic, fewer would leave more columns.
_COLUMN = 64

# Where the target's probability of a successor changes what it is worth.
_BUCKETS = (0.05, 0.12, 0.25, 0.45, 0.7, 0.9)

# How often a successor was right, over the probability it had: where the last token alone was known, and where the last
# two were. Measured on chats and summaries; it sets the order in which a tree grows, acceptance is estimated elsewhere.
_TRUST = (0.4, 0.95)


def _evidence(pair: int, first: bool, level: int) -> Evidence:
    return ("recycling", pair + 1, int(first), sum(level >= 255 * edge for edge in _BUCKETS))


# By tokens known - 1, whether the successor is the likeliest, and its probability in 255ths.
_EVIDENCE = tuple(
    tuple(tuple(_evidence(pair, first, level) for level in range(256)) for first in (False, True)) for pair in (0, 1)
)
_CHANCE = tuple(tuple(trust * level / 255 for level in range(256)) for trust in _TRUST)

# Tokens, likeliest first, their probabilities in 255ths, and 1 if the last two tokens were known, 0 if just the last.
_Successors: TypeAlias = "tuple[list[int], list[int], int]"


class RecyclingDrafter:
    """Remembers, for the last two tokens and for the last one, which tokens the target's logits favoured next.

    After Luo et al. 2024 ("Turning trash into treasure: accelerating inference of large language models with token
    recycling"), with pairs of tokens besides, and with the probabilities. What was seen last counts. All rows of a
    target call teach, whether or not the text went that way: most of what is proposed later was rejected before.

    The memory is a hash table of fixed size where a newcomer replaces whatever has its place. It outlives the request,
    for what it knows are habits of the model.
    """

    name = "recycling"

    def __init__(self) -> None:
        slots = 1 << _SLOT_BITS
        self._keys = np.zeros(slots, np.int64)  # 0: free
        self._tokens = np.zeros((slots, _WIDTH), np.int32)
        self._levels = np.zeros((slots, _WIDTH), np.uint8)  # probabilities in 255ths; from the first 0 on, no successor
        self._key_at = self._keys.data  # single items are read several times faster through it
        self._tail: list[int] = []  # the end of the text, as the last outcome told it

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table."""
        return self._keys.nbytes + self._tokens.nbytes + self._levels.nbytes

    def propose(self, context: Context, budget: Budget, prefix: Sequence[int] = ()) -> Proposal:
        """Grow a tree from the last token, each time by the node that is likeliest to be accepted.

        Args:
            context: the text to continue.
            budget: how much may be proposed; without branches, a chain of likeliest successors.
            prefix: tokens proposed already.

        Returns:
            At most ``budget.tokens`` tokens; none if the last token was never met.
        """
        last_two = [*context.tokens[-2:], *prefix[-2:]][-2:]
        if budget.tokens < 1 or not last_two:
            return Proposal()
        tokens: list[int] = []
        parents: list[int] = []
        evidence: list[Evidence] = []
        reach: list[float] = []
        # (-probability, a number that settles ties, parent, the parent's probability, rank, successors of the parent)
        queue: list[tuple[float, int, int, float, int, _Successors]] = []
        pushed = 0
        found = self._find(last_two[0] if len(last_two) == 2 else -1, last_two[-1])
        if found is not None:
            queue.append((-_CHANCE[found[2]][found[1][0]], 0, -1, 1.0, 0, found))
        while queue and len(tokens) < budget.tokens:
            negative, _, parent, before, rank, successors = heappop(queue)
            candidates, levels, pair = successors
            node, token = len(tokens), candidates[rank]
            tokens.append(token)
            parents.append(parent)
            evidence.append(_EVIDENCE[pair][rank == 0][levels[rank]])
            reach.append((reach[parent] if parent >= 0 else 0.0) - negative)
            rank += 1
            if budget.branches and rank < _WIDTH and levels[rank]:
                pushed += 1
                heappush(queue, (-before * _CHANCE[pair][levels[rank]], pushed, parent, before, rank, successors))
            found = self._find(tokens[parent] if parent >= 0 else last_two[-1], token)
            if found is not None:
                pushed += 1
                heappush(queue, (negative * _CHANCE[found[2]][found[1][0]], pushed, node, -negative, 0, found))
        return lay_out(trunk_first(range(len(tokens)), parents, reach), tokens, parents, evidence)

    def observe(self, outcome: Outcome) -> None:
        """Remember the likeliest tokens of every row."""
        proposal, path = outcome.proposal, outcome.path
        parents = range(-1, len(proposal) - 1) if proposal.parents is None else proposal.parents
        pairs = [(self._before(outcome.last), outcome.last)]
        for token, parent in zip(proposal.tokens, parents, strict=True):
            pairs.append((pairs[parent + 1][1], token))
        self._tail = [outcome.last, *[proposal.tokens[node] for node in path], outcome.next_token]

        # The rows of the accepted path come last, so that theirs is the last word.
        accepted = {0, *[node + 1 for node in path]}
        rows = [row for row in range(len(outcome.logits)) if row not in accepted]
        rows += sorted(accepted)
        slots: list[int] = []
        sources: list[int] = []
        for row in rows:
            before, token = pairs[row]
            for key in (_key(before, token), _key(-1, token)):
                slot = _slot(key)
                self._key_at[slot] = key
                slots.append(slot)
                sources.append(row)
        logits = outcome.logits
        if isinstance(logits, SelectedRows):
            tokens, probabilities = logits.best(_WIDTH)
        else:
            tokens, probabilities = likeliest(np.asarray(logits), _WIDTH)
        levels = np.rint(probabilities * 255).astype(np.uint8)
        width = tokens.shape[1]
        self._tokens[slots, :width] = tokens[sources]
        self._levels[slots, :width] = levels[sources]

    def rollback(self, length: int) -> None:
        """Forget how the text went; what followed a token belongs to no position."""
        if length == 0:
            self._tail = []

    def _before(self, last: int) -> int:
        """The token before ``last``, which the previous outcome tells; -1 if it does not."""
        tail = self._tail
        return next((tail[place - 1] for place in range(len(tail) - 1, 0, -1) if tail[place] == last), -1)

    def _find(self, before: int, token: int) -> _Successors | None:
        """What may follow these two tokens, or else the second."""
        for known in (before, -1):
            key = _key(known, token)
            slot = _slot(key)
            if self._key_at[slot] == key:
                levels = self._levels[slot].tolist()
                if levels[0]:
                    return self._tokens[slot].tolist(), levels, int(known >= 0)
        return None


def likeliest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The likeliest tokens of each row, and roughly how likely they are.

    A row is cut into columns. The largest ``count`` logits lie in the columns with the largest maxima, so only those
    are looked through. The maxima stand for the whole row where probabilities are normalized: what else is in the
    columns weighs little, and estimates come out slightly high.

    Args:
        logits: float32 [rows, vocab].
        count: tokens wanted.

    Returns:
        Tokens, int64 [rows, min(count, vocab)], likeliest first, and their probabilities, float32 of the same shape;
        0 in rows with NaN or infinity.
    """
    rows, vocab = logits.shape
    height = max(min(_COLUMN, vocab // _COLUMN), 1)
    width = vocab // height
    covered = height * width
    maxima = logits[:, :covered].reshape(rows, height, width).max(axis=1)
    columns = maxima.argpartition(-min(count, width), axis=1)[:, -count:]
    tokens = (columns[:, None, :] + np.arange(0, covered, width)[:, None]).reshape(rows, -1)
    if covered < vocab:
        rest = np.broadcast_to(np.arange(covered, vocab), (rows, vocab - covered))
        tokens = np.concatenate((tokens, rest), axis=1)
        maxima = np.concatenate((maxima, logits[:, covered:]), axis=1)
    row = np.arange(rows)[:, None]
    values = logits[row, tokens]
    best = values.argpartition(-min(count, tokens.shape[1]), axis=1)[:, -count:]
    best = best[row, (-values[row, best]).argsort(axis=1)]
    tokens, values = tokens[row, best], values[row, best]
    with np.errstate(invalid="ignore"):
        total = np.exp(maxima - values[:, :1]).sum(axis=1, keepdims=True)
        probabilities = np.exp(values - values[:, :1]) / total
    return tokens, np.fmax(probabilities, np.float32(0.0))  # fmax prefers numbers to NaN


def _key(before: int, token: int) -> int:
    """A number for two tokens, or for one if ``before`` is -1; never 0."""
    return (before + 2) << 32 | token


def _slot(key: int) -> int:
    return (key * _MULTIPLIER & _WORD) >> (64 - _SLOT_BITS)
