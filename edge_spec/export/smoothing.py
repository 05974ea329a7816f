"""Scales between a matrix and what feeds it, so that 8 bits per row and per channel lose less (docs/quantization.md).

A row of activations is rounded in steps of its largest element, a channel of weights likewise. Dividing one input
channel's activations by a factor and multiplying its weights by the same changes nothing but these steps. The division
is folded into what produces the channel (SmoothQuant, Xiao et al. 2023): the gain of the norm, the rows of v or of up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.recipe import Recipe
from edge_spec.export.reference import LayerInputs

Float32Array = npt.NDArray[np.float32]

# Candidates are activations ** exponent, and the same over weights ** (1 - exponent).
_EXPONENTS = (0.2, 0.35, 0.5, 0.65, 0.8)
# Channels of weights that the law is evaluated for: enough to know their maxima, and no copy of a large matrix.
_CHANNELS_SEEN = 512
# Smaller extremes count as this much of the largest: a channel without values asks for no infinite factor.
_LEAST = np.float32(1e-5)


def smooth_layer(
    layer: DecoderLayer, inputs: LayerInputs, kv_heads: int, head_size: int, recipe: Recipe
) -> DecoderLayer:
    """Rescale the inputs of a layer's ``w8a8`` matrices; the function the layer computes stays the same.

    Args:
        layer: float32 weights.
        inputs: of a calibration text.
        kv_heads: heads of keys and values, whose channels are shared by groups of query heads.
        head_size: channels of a head.
        recipe: says which matrices are ``w8a8``.
    """
    qkv, qkv_bias, gate_up, gate_up_bias = layer.qkv, layer.qkv_bias, layer.gate_up, layer.gate_up_bias
    output, down, input_norm, mlp_norm = layer.output, layer.down, layer.input_norm, layer.mlp_norm
    if recipe.attention == "w8a8":
        shared = _value_channels(output.shape[1], kv_heads, head_size)
        scale = smoothing_scale(inputs.output, output, shared)
        output = output * scale[shared]
        qkv, qkv_bias = _divide_last_rows(qkv, scale), _divide_last_rows(qkv_bias, scale)
        scale = smoothing_scale(inputs.qkv, qkv)
        qkv, input_norm = qkv * scale, input_norm / scale
    if recipe.mlp_down == "w8a8":
        scale = smoothing_scale(inputs.down, down)
        down = down * scale
        # Up comes last in gate_up, and what it gives is multiplied, so any factor passes through.
        gate_up, gate_up_bias = _divide_last_rows(gate_up, scale), _divide_last_rows(gate_up_bias, scale)
    if recipe.mlp_up == "w8a8":
        scale = smoothing_scale(inputs.gate_up, gate_up)
        gate_up, mlp_norm = gate_up * scale, mlp_norm / scale
    return replace(
        layer,
        input_norm=input_norm,
        qkv=cast("Float32Array", qkv),
        qkv_bias=qkv_bias,
        output=output,
        mlp_norm=mlp_norm,
        gate_up=cast("Float32Array", gate_up),
        gate_up_bias=gate_up_bias,
        down=down,
    )


def smoothing_scale(
    x: Float32Array, weight: Float32Array, shared: npt.NDArray[np.int64] | None = None
) -> Float32Array:
    """Choose by how much to divide each input channel of a ``w8a8`` matrix.

    Rounding in steps of d adds noise of variance d**2 / 12. With activations x / s and weights W * s the expected error
    of the product is, up to a factor,

        sum_t max_j (x_tj / s_j)^2 * sum_j s_j^2 |W_j|^2 + sum_i max_j (W_ij s_j)^2 * sum_j |x_j|^2 / s_j^2

    with tokens t, inputs j and outputs i. The candidate with the least is then rounded for real, and dropped for ones
    if that is no better.

    Args:
        x: float32 [tokens, in].
        weight: float32 [out, in].
        shared: int64 [in], which scale an input takes, where several share one.

    Returns:
        float32 [scales], as many as inputs, or as ``shared`` names.
    """
    weight = weight[:: max(1, len(weight) // _CHANNELS_SEEN)]
    activations, weights = np.abs(x), np.abs(weight)
    largest, heaviest = activations.max(axis=0), weights.max(axis=0)
    if shared is None:
        shared = np.arange(len(largest))
    largest, heaviest = (_extremes(values, shared) for values in (largest, heaviest))
    energy, mass = np.square(x).sum(axis=0), np.square(weight).sum(axis=0)

    def noise(scale: Float32Array) -> float:
        each = scale[shared]
        rows, columns = (activations / each).max(axis=1), (weights * each).max(axis=1)
        return float(
            np.square(rows).sum() * (mass * np.square(each)).sum()
            + np.square(columns).sum() * (energy / np.square(each)).sum()
        )

    candidates = [largest**a / heaviest**b for a in _EXPONENTS for b in (0.0, 1 - a)]
    best = min((_centred(scale) for scale in candidates), key=noise)
    none = np.ones_like(best)
    return best if _error(x, weight, best[shared]) < _error(x, weight, none[shared]) else none


def _error(x: Float32Array, weight: Float32Array, scale: Float32Array) -> float:
    """The squared error of a product whose factors are rounded after rescaling."""
    off = _rounded(x / scale) @ _rounded(weight * scale).T - x @ weight.T
    return float(np.vdot(off, off))


def _rounded(rows: Float32Array) -> Float32Array:
    step = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    rounded: Float32Array = np.rint(rows / step) * step
    return rounded


def _centred(scale: Float32Array) -> Float32Array:
    """Divide by the geometric mean, which changes no rounding and keeps numbers in range."""
    centred: Float32Array = (scale / np.exp(np.log(scale).mean())).astype(np.float32)
    return centred


def _extremes(values: Float32Array, shared: npt.NDArray[np.int64]) -> Float32Array:
    """The largest value of those that share a scale, none much smaller than the largest of all."""
    extremes = np.zeros(shared.max() + 1, np.float32)
    np.maximum.at(extremes, shared, values)
    top = extremes.max()
    return np.maximum(extremes, top * _LEAST) if top > 0 else np.ones_like(extremes)


def _value_channels(width: int, kv_heads: int, head_size: int) -> npt.NDArray[np.int64]:
    """For each input of the output projection, the channel of v that it is a mean of. int64 [width]."""
    channels = np.arange(kv_heads * head_size).reshape(kv_heads, 1, head_size)
    group = width // (kv_heads * head_size)
    return np.tile(channels, (1, group, 1)).reshape(-1)


def _divide_last_rows(array: Float32Array | None, scale: Float32Array) -> Float32Array | None:
    """Divide the last rows of a matrix, or elements of a vector, by a factor each."""
    if array is None:
        return None
    divided = array.copy()
    last = divided[len(array) - len(scale) :]
    last /= scale.reshape(-1, *[1] * (array.ndim - 1))
    return divided
