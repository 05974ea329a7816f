"""Scales between a matrix and what feeds it, so that rounding them loses less (docs/quantization.md).

A row of activations is rounded in steps of its largest element, a channel or block of weights likewise. Dividing one
input's activations by a factor and multiplying its weights by the same changes nothing but these steps: in w8a8 the
factors take outliers from the activations (SmoothQuant, Xiao et al. 2023), in int4 they give more of a block's steps to
the inputs that matter most (AWQ, Lin et al. 2024). The division is folded into what produces the input: the gain of the
norm, the rows of v or of up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.mixing import mix, run_length
from edge_spec.export.recipe import MatrixFormat, Recipe
from edge_spec.export.reference import LayerInputs
from edge_spec.export.strips import strips

Float32Array = npt.NDArray[np.float32]

# Candidates in w8a8 are activations ** exponent, and the same over weights ** (1 - exponent); in int4 only the former.
_EXPONENTS = (0.2, 0.35, 0.5, 0.65, 0.8)
_INT4_EXPONENTS = (0.15, 0.25, 0.4)
# Channels of weights that candidates are compared on: enough to know, and no copy of a large matrix.
_CHANNELS_SEEN = 512
_INT4_CHANNELS_SEEN = 128
# Smaller extremes count as this much of the largest: a channel without values asks for no infinite factor.
_LEAST = np.float32(1e-5)

ErrorOf = Callable[[Float32Array], float]


@dataclass(frozen=True)
class LayerImportance:
    """Mean square of each input of a layer's matrices, float32 [in]."""

    qkv: Float32Array
    output: Float32Array
    gate_up: Float32Array
    down: Float32Array


def smooth_layer(
    layer: DecoderLayer, inputs: LayerInputs, kv_heads: int, head_size: int, recipe: Recipe
) -> LayerImportance:
    """Rescale the inputs of a layer's ``w8a8`` and ``int4`` matrices; the layer still computes the same function.

    Args:
        layer: float32 weights, changed in place, since copies of large matrices take longer than all the rest.
        inputs: of a calibration text.
        kv_heads: heads of keys and values, whose channels are shared by groups of query heads.
        head_size: channels of a head.
        recipe: says how matrices are stored.

    Returns:
        How large its rescaled inputs are.
    """
    shared = _value_channels(layer.output.shape[1], kv_heads, head_size)
    value_scale = smoothing_scale(inputs.output, layer.output, recipe.attention, recipe.block_size, shared)
    run = run_length(layer.down.shape[1])
    down_scale = smoothing_scale(inputs.down, layer.down, recipe.mlp_down, recipe.block_size, run=run)
    # V comes last in qkv. So does up in gate_up: what it gives is multiplied, so any factor passes through.
    _divide_last_rows(layer.qkv, layer.qkv_bias, value_scale)
    _divide_last_rows(layer.gate_up, layer.gate_up_bias, down_scale)
    qkv_scale = smoothing_scale(inputs.qkv, layer.qkv, recipe.attention, recipe.block_size)
    mlp_scale = smoothing_scale(inputs.gate_up, layer.gate_up, recipe.mlp_up, recipe.block_size)
    output_scale = value_scale[shared]
    for weight, scale in (
        (layer.qkv, qkv_scale),
        (layer.output, output_scale),
        (layer.gate_up, mlp_scale),
        (layer.down, down_scale),
    ):
        weight *= scale
    for gain, scale in ((layer.input_norm, qkv_scale), (layer.mlp_norm, mlp_scale)):
        gain /= scale
    return LayerImportance(
        qkv=mean_square(inputs.qkv / qkv_scale),
        output=mean_square(inputs.output / output_scale),
        gate_up=mean_square(inputs.gate_up / mlp_scale),
        down=mean_square(inputs.down / down_scale),
    )


def mean_square(x: Float32Array) -> Float32Array:
    """The mean square of each column of float32 [tokens, in]."""
    mean: Float32Array = np.square(x).mean(axis=0)
    return mean


def smoothing_scale(
    x: Float32Array,
    weight: Float32Array,
    storage: MatrixFormat,
    block_size: int = 32,
    shared: npt.NDArray[np.int64] | None = None,
    run: int = 1,
) -> Float32Array:
    """Choose by how much to divide each input of a matrix.

    Args:
        x: float32 [tokens, in].
        weight: float32 [out, in].
        storage: of the matrix; where it is not rounded to integers, the scales are ones.
        block_size: inputs that share a scale in ``int4``.
        shared: int64 [in], which scale an input takes, where several share one.
        run: neighbouring inputs that are mixed before ``w8a8`` rounds them.

    Returns:
        float32 [scales], as many as inputs, or as ``shared`` names.
    """
    if shared is None:
        shared = np.arange(weight.shape[1])
    none = np.ones(shared.max() + 1, np.float32)
    if storage not in ("w8a8", "int4"):
        return none
    weight = weight[:: max(1, len(weight) // (_CHANNELS_SEEN if storage == "w8a8" else _INT4_CHANNELS_SEEN))]
    largest = _extremes(np.abs(x).max(axis=0), shared)
    if storage == "int4":
        candidates = [_centred(largest**a) for a in _INT4_EXPONENTS]
        return min([none, *candidates], key=lambda scale: _int4_error(x, weight, scale[shared], block_size))
    heaviest = _extremes(np.abs(weight).max(axis=0), shared)
    noise = _w8a8_noise(x, weight, shared, run)
    best = min((_centred(largest**a / heaviest**b) for a in _EXPONENTS for b in (0.0, 1 - a)), key=noise)
    # The law takes a few things for granted, so the candidate is rounded for real.
    error, plain = (_w8a8_error(x, weight, scale[shared], run) for scale in (best, none))
    return best if error < plain else none


def _w8a8_noise(x: Float32Array, weight: Float32Array, shared: npt.NDArray[np.int64], run: int) -> ErrorOf:
    """The expected squared error of a product as a function of the scales, up to a factor.

    Rounding in steps of d adds noise of variance d**2 / 12. With activations x / s and weights W * s that makes

        sum_t max_j (x_tj / s_j)^2 * sum_j s_j^2 |W_j|^2 + sum_i max_j (W_ij s_j)^2 * sum_j |x_j|^2 / s_j^2

    with tokens t, inputs j and outputs i. Mixing runs of inputs changes the extremes, but no length.
    """
    energy, mass = np.square(x).sum(axis=0), np.square(weight).sum(axis=0)

    def noise(scale: Float32Array) -> float:
        each = scale[shared]
        rows, columns = _row_extremes(x, np.reciprocal(each), run), _row_extremes(weight, each, run)
        return float(
            np.square(rows).sum() * (mass * np.square(each)).sum()
            + np.square(columns).sum() * (energy / np.square(each)).sum()
        )

    return noise


def _row_extremes(x: Float32Array, factor: Float32Array, run: int) -> Float32Array:
    """The largest magnitude in each row once its elements are rescaled and mixed, float32 [rows]."""
    extremes = [np.abs(mix(x[strip] * factor, run)).max(axis=1) for strip in strips(*x.shape)]
    return np.concatenate(extremes)


def _int4_error(x: Float32Array, weight: Float32Array, scale: Float32Array, block_size: int) -> float:
    """The expected squared error of a product with weights in blocks, for inputs that are independent."""
    scaled, importance = weight * scale, mean_square(x) / np.square(scale)
    missing = -weight.shape[1] % block_size
    grouped = np.pad(scaled, ((0, 0), (0, missing))).reshape(len(weight), -1, block_size)
    highest, lowest = (np.maximum(extreme, 0) for extreme in (grouped.max(axis=2), -grouped.min(axis=2)))
    step = np.maximum((highest + lowest) / np.float32(15), np.finfo(np.float32).tiny)[:, :, None]
    off = (np.rint(grouped / step) * step - grouped).reshape(len(weight), -1)[:, : weight.shape[1]]
    return float(np.square(off).sum(axis=0) @ importance)


def _w8a8_error(x: Float32Array, weight: Float32Array, scale: Float32Array, run: int) -> float:
    """The squared error of a product whose factors are rounded after rescaling."""
    off = _rounded(mix(x / scale, run)) @ _rounded(mix(weight * scale, run)).T - x @ weight.T
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


def _divide_last_rows(weight: Float32Array, bias: Float32Array | None, scale: Float32Array) -> None:
    """Divide what the last rows of a matrix give by a factor each, in place."""
    weight[len(weight) - len(scale) :] /= scale[:, None]
    if bias is not None:
        bias[len(bias) - len(scale) :] /= scale
