"""Randomness without state: every number is a function of the seed and of what it decides."""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1024  # weights summed at a time when sampling
_PIECE = 2**14  # tokens given noise at a time, so that intermediate values stay in the cache
_EXTRA_BITS = 2**32  # where, in a Gumbel stream, the numbers begin that refine others


class Stream(IntEnum):
    """What a number decides. Decisions about one position take their noise from different streams.

    The values are part of what a seed means: changing one changes every text sampled with a seed.
    """

    TOKEN = 0  # the target's own token where it is drawn: plain decoding, the bonus, the replacement of a draft token
    ACCEPT = 1  # whether a draft token is kept
    DRAFT = 2  # the draft token itself
    GUMBEL = 3  # the noise that target and drafter share under the coupled rule


def uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """Noise for one decision: a number in [0, 1) that depends on its four keys and on nothing else.

    Philox is a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): keyed
    by the seed, it maps every counter to independent bits. So noise needs no state, and a position that is decided
    again after a rollback meets the same noise.

    Args:
        seed: 64-bit signed integer.
        position: absolute position in the sequence of the token being decided; where a round decides about several
            (see :class:`RoundNoise`), of its first.
        stream: what is being decided, see :class:`Stream`.
        index: which of several decisions of that kind.
    """
    bits = int(_philox(seed, index, position, stream).random_raw())
    return (bits >> 11) * 2.0**-53


def gumbel(seed: int, position: int, vocab: int) -> NDArray[np.float32]:
    """Gumbel noise for one position: -log(-log u) for every token, u uniform in (0, 1).

    The token with the largest log p + noise then has the law p (Gumbel 1954; Maddison et al. 2014, "A* sampling").
    A token's noise does not depend on the size of the vocabulary.

    The largest noises decide, and they come from u next to one. So the distance w = 1 - u is what is drawn: 32 bits,
    and another 53 for the few small ones, so that w has full single precision wherever it is below 2^-8.

    Args:
        seed: 64-bit signed integer.
        position: absolute position in the sequence of the token being decided.
        vocab: number of tokens, at least one.

    Returns:
        float32 [vocab], all finite.
    """
    generator = _philox(seed, 0, position, Stream.GUMBEL)
    noise = np.empty(vocab, np.float32)
    small: list[NDArray[np.int64]] = []
    small_bits: list[NDArray[np.uint32]] = []
    for start in range(0, vocab, _PIECE):
        piece = noise[start : start + _PIECE]
        bits = generator.random_raw((len(piece) + 1) // 2).view(np.uint32)[: len(piece)]
        where = np.flatnonzero(bits < 2**24)
        small.append(start + where)
        small_bits.append(bits[where])
        bits >>= np.uint32(8)
        np.subtract(np.uint32(2**24), bits, out=piece, casting="unsafe")  # u * 2^24, exact in float32
        piece *= np.float32(2.0**-24)
        with np.errstate(divide="ignore"):  # u = 1 is among the small w
            _minus_log(piece)
            _minus_log(piece)
    refined = np.concatenate(small)
    extra = _philox(seed, _EXTRA_BITS, position, Stream.GUMBEL).random_raw(len(refined))
    w = (np.concatenate(small_bits) + ((extra >> np.uint64(11)) + 0.5) * 2.0**-53) * 2.0**-32
    noise[refined] = -np.log(-np.log1p(-w))
    return noise


def gumbel_bits(seed: int, position: int, vocab: int) -> NDArray[np.uint32]:
    """The bits, uint32 [vocab], that :func:`gumbel` makes noise of: the fewer, the more noise."""
    return _philox(seed, 0, position, Stream.GUMBEL).random_raw((vocab + 1) // 2).view(np.uint32)[:vocab]


def gumbel_of(seed: int, position: int, bits: NDArray[np.uint32], ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The noise of some tokens, float32 [n], bit for bit what :func:`gumbel` says, which takes longer.

    Args:
        seed: as there.
        position: as there.
        bits: of all tokens, see :func:`gumbel_bits`.
        ids: int64 [n], which tokens.
    """
    drawn = bits[ids]
    noise = (np.uint32(2**24) - (drawn >> np.uint32(8))).astype(np.float32)
    noise *= np.float32(2.0**-24)
    with np.errstate(divide="ignore"):
        _minus_log(noise)
        _minus_log(noise)
    refined = np.flatnonzero(drawn < 2**24)
    if len(refined):
        small = np.flatnonzero(bits < 2**24)
        extra = _philox(seed, _EXTRA_BITS, position, Stream.GUMBEL).random_raw(len(small))
        extra = extra[np.searchsorted(small, ids[refined])]
        w = (drawn[refined] + ((extra >> np.uint64(11)) + 0.5) * 2.0**-53) * 2.0**-32
        noise[refined] = -np.log(-np.log1p(-w))
    return noise


def sample(weights: NDArray[np.floating[Any]], noise: float) -> int:
    """The token whose share of the weights, laid end to end by id, covers ``noise``.

    A token of weight zero is never returned, whatever the rounding.

    Args:
        weights: [vocab], non-negative, not all zero; need not sum to one.
        noise: uniform in [0, 1).
    """
    # A running sum over a whole vocabulary takes milliseconds, since each addition waits for the one before it. Sums
    # of blocks do not wait for each other, and then only one block needs a running sum.
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    target = noise * blocks[-1]
    block = _first_above(blocks, target)
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _first_above(inside, target - (blocks[block - 1] if block else 0.0))


def sample_gumbel(weights: NDArray[np.floating[Any]], noise: NDArray[np.floating[Any]]) -> int:
    """The token with the largest log weight + noise; the lowest id among equals.

    A token of weight zero is never returned.

    Args:
        weights: [vocab], non-negative, not all zero; need not sum to one.
        noise: [vocab], see :func:`gumbel`.
    """
    with np.errstate(divide="ignore"):  # log 0 = -inf is the right value
        scores = np.log(weights)
    scores += noise
    return int(np.argmax(scores))


class Noise:
    """The noise of one request.

    Target and drafter need the Gumbel noise of the same positions one after the other, so the last few are kept.
    """

    def __init__(self, seed: int, kept: int = 24) -> None:
        """Noise keyed by ``seed``, keeping Gumbel vectors (4 bytes a token of the vocabulary) of ``kept`` positions."""
        self.seed = seed
        self._kept = kept
        self._vectors: OrderedDict[tuple[int, int, bool], NDArray[Any]] = OrderedDict()  # noise, or its bits

    def uniform(self, position: int, stream: int, index: int = 0) -> float:
        """See :func:`uniform`."""
        return uniform(self.seed, position, stream, index)

    def gumbel(self, position: int, vocab: int) -> NDArray[np.float32]:
        """See :func:`gumbel`; the array is shared and read-only."""
        return self._vector(position, vocab, finished=True)

    def gumbel_of(self, position: int, vocab: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The same for some of the tokens, float32 [n], which takes a fraction of the time if they are few."""
        if (position, vocab, True) in self._vectors:
            noise: NDArray[np.float32] = self.gumbel(position, vocab)[ids]
            return noise
        return gumbel_of(self.seed, position, self._vector(position, vocab, finished=False), ids)

    def louder(self, position: int, vocab: int, least: float) -> NDArray[np.int64]:
        """All tokens whose noise exceeds ``least``, ascending, int64 [n], and maybe some that nearly do."""
        # Noise grows as the bits fall. A little less is asked for, for what single precision makes of it.
        share = -math.expm1(-math.exp(-max(least - 1e-3, -30.0)))
        bits = self._vector(position, vocab, finished=False)
        return np.flatnonzero(bits <= np.uint32(min(share * 2.0**32, 2.0**32 - 1.0)))

    def _vector(self, position: int, vocab: int, finished: bool) -> NDArray[Any]:
        key = (position, vocab, finished)
        vector = self._vectors.pop(key, None)
        if vector is None:
            vector = (gumbel if finished else gumbel_bits)(self.seed, position, vocab)
            vector.flags.writeable = False
        self._vectors[key] = vector
        while len(self._vectors) > self._kept:
            self._vectors.popitem(last=False)
        return vector

    def round(self, start: int) -> RoundNoise:
        """The noise of the round whose first token has the absolute position ``start``."""
        for key in [key for key in self._vectors if key[0] < start]:
            del self._vectors[key]
        return RoundNoise(self, start)


class RoundNoise:
    """The noise of one round of drafting and verification.

    The Gumbel noise of a token is keyed by its absolute position, which makes the coupled rule's text independent of
    how it was cut into rounds. All other noise is keyed by the round's first position and the draft token's number.
    It must be: the block and traversal rules look at draft tokens and noise beyond the place where they stop, so the
    next round, deciding about those positions again, would meet noise that is no longer uniform. Rounds start at
    different positions, since each emits a token, so no noise is used twice.
    """

    def __init__(self, noise: Noise, start: int) -> None:
        self._noise = noise
        self._start = start

    def keep(self, node: int, probability: float) -> bool:
        """Whether draft token number ``node`` is kept, which happens with this probability."""
        if not 0.0 < probability < 1.0:
            return probability >= 1.0
        return self._noise.uniform(self._start, Stream.ACCEPT, node) < probability

    def draw(self, weights: NDArray[np.floating[Any]]) -> int:
        """The target's own token of this round, by weights that need not sum to one."""
        return sample(weights, self._noise.uniform(self._start, Stream.TOKEN))

    def draw_draft(self, node: int, weights: NDArray[np.floating[Any]]) -> int:
        """Draft token number ``node``, by weights that need not sum to one."""
        return sample(weights, self._noise.uniform(self._start, Stream.DRAFT, node))

    def gumbel(self, depth: int, vocab: int) -> NDArray[np.float32]:
        """Noise float32 [vocab] for the token that follows ``depth`` tokens of this round."""
        return self._noise.gumbel(self._start + depth, vocab)

    def gumbel_of(self, depth: int, vocab: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """That of some tokens, float32 [n]."""
        return self._noise.gumbel_of(self._start + depth, vocab, ids)

    def louder(self, depth: int, vocab: int, least: float) -> NDArray[np.int64]:
        """All tokens whose noise exceeds ``least``, ascending, int64 [n], and maybe some that nearly do."""
        return self._noise.louder(self._start + depth, vocab, least)


def _philox(seed: int, index: int, position: int, stream: int) -> np.random.Philox:
    """The generator at one counter. It counts up in the counter's first word."""
    key = np.array([seed & (2**64 - 1), 0], np.uint64)
    return np.random.Philox(key=key, counter=np.array([index, position, stream, 0], np.uint64))


def _minus_log(values: NDArray[np.float32]) -> None:
    np.log(values, out=values)
    np.negative(values, out=values)


def _first_above(edges: NDArray[np.float64], target: float) -> int:
    """Index of the first of the running sums above ``target``; the last that grew if rounding leaves none."""
    index = int(np.searchsorted(edges, target, side="right"))
    return index if index < len(edges) else int(np.searchsorted(edges, edges[-1]))
