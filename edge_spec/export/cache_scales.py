"""Scales of an int8 KV cache, fixed at export from what a model caches of a text (docs/quantization.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

# How far beyond the calibration text's extremes a channel reaches. More would cost resolution everywhere; less would
# clip more of other texts.
_MARGIN = 1.25

_SMALLEST = np.finfo(np.float32).tiny

# What the numeric check's text lacks: dialogue, lists, markup, and more kinds of code and script. Read after that text.
TEXT = """
User: Compare two ways to store sensor readings.
Assistant: 1. **CSV** - simple, but parsed again: `2024-03-09T18:22:41Z,21.75,-0.03`.
2. **SQLite** - `SELECT AVG(value) FROM readings WHERE day >= '2024-03-01';`

const ring = new Array(64); // overwrite
<p class="note">Prices: $12.50 &amp; 3 %</p> {"name": "pump-7", "ok": true, "limits": [0, 1e-6]}

The old mathematician wrote that if x^2 + 4x = 21 then x is 3 or -7. Nobody in the village believed him, least of all \
the baker, whose daughter had left for Lisbon in the spring. OÙ EST LA GARE ? Поезд опаздывает. 今日は雨です。 🙂
"""


@dataclass(frozen=True)
class CacheScales:
    """Steps of one layer's cache, float32 [kv_heads, head_size] each: a number is round(x / scale), at most 127."""

    key: Float32Array
    value: Float32Array


def cache_scales(keys: Float32Array, values: Float32Array, rotated: int) -> CacheScales:
    """Choose the scales of one layer.

    A key's halves are rotated against each other by its position, so both numbers of a rotated pair get the range of
    the pair's length, which no position changes.

    Args:
        keys: float32 [kv_heads, tokens, head_size], rotated, first halves first.
        values: likewise, not rotated.
        rotated: how many elements of each key are rotated, the first ones.
    """
    first, second, rest = np.split(keys, [rotated // 2, rotated], axis=2)
    lengths, others = np.hypot(first, second).max(axis=1), np.abs(rest).max(axis=1)
    return CacheScales(_scale(np.concatenate([lengths, lengths, others], axis=1)), _scale(np.abs(values).max(axis=1)))


def _scale(extremes: Float32Array) -> Float32Array:
    scale: Float32Array = np.maximum(extremes * np.float32(_MARGIN / 127), _SMALLEST)
    return scale
