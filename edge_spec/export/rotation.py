"""An orthogonal rotation of the residual stream, folded into the weights (docs/quantization.md).

A decoder only ever adds to the residual stream, and reads it through an RMS norm, which depends on lengths alone. With
the gains folded into the matrices behind the norms, the whole stream can be rotated (QuaRot, Ashkboos et al. 2024):
the model computes the same, but no channel stands out any more, so a step of 1/127 of a row's largest element is small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.reference import LayerInputs
from edge_spec.export.strips import strips

Float32Array = npt.NDArray[np.float32]


class Rotation:
    """A fixed orthogonal matrix R of some size: random signs, then the Kronecker product of two small factors."""

    def __init__(self, size: int) -> None:
        """Any size will do; powers of two in it become Hadamard matrices, the odd rest a cosine transform."""
        twos = (size & -size).bit_length() - 1
        odd = size >> twos
        # Factors of about equal size cost least.
        left = twos - max(0, round((twos - np.log2(odd)) / 2))
        self._left = hadamard(left)
        self._right = np.kron(hadamard(twos - left), _cosines(odd))
        signs = np.random.default_rng(size).integers(0, 2, size)
        self._signs = (2 * signs - 1).astype(np.float32)

    @property
    def factors(self) -> tuple[Float32Array, Float32Array, Float32Array]:
        """L [left, left], K [right, right] and signs s [size]: x R is L X K, and X [left, right] is x * s."""
        return self._left, self._right, self._signs

    def rows(self, x: Float32Array, gain: Float32Array | None = None) -> Float32Array:
        """Return x R, float32 [rows, size]; with ``gain``, float32 [size], which scales x before, x diag(gain) R."""
        left, right = len(self._left), len(self._right)
        factor = self._signs if gain is None else self._signs * gain
        rotated = np.empty(x.shape, np.float32)
        for strip in strips(*x.shape):
            product = (x[strip] * factor).reshape(-1, right) @ self._right
            np.matmul(self._left, product.reshape(-1, left, right), out=rotated[strip].reshape(-1, left, right))
        return rotated

    def columns(self, x: Float32Array) -> Float32Array:
        """Return R^T x, float32 [size, columns]."""
        left, right = len(self._left), len(self._right)
        rotated = np.empty(x.shape, np.float32)
        for strip in strips(x.shape[1], x.shape[0]):
            product = np.matmul(self._right.T, (x[:, strip] * self._signs[:, None]).reshape(left, right, -1))
            rotated[:, strip] = (self._left @ product.reshape(left, -1)).reshape(len(x), -1)
        return rotated


def rotate_layer(layer: DecoderLayer, inputs: LayerInputs, rotation: Rotation) -> tuple[DecoderLayer, LayerInputs]:
    """Make a layer read and write the rotated residual stream.

    Args:
        layer: float32 weights; its norms have gains of one afterwards.
        inputs: what a text brings to its matrices.
        rotation: of the stream.

    Returns:
        The layer, and what the same text brings to its matrices now.
    """

    def reading(weight: Float32Array, gain: Float32Array) -> Float32Array:
        return rotation.rows(weight, gain)

    def writing(bias: Float32Array | None) -> Float32Array | None:
        return None if bias is None else rotation.rows(bias[None])[0]

    def read(x: Float32Array, gain: Float32Array) -> Float32Array:
        # What a gain of zero hides is lost, and its weights are zero.
        return rotation.rows(np.divide(x, gain, out=np.zeros_like(x), where=gain != 0))

    rotated = replace(
        layer,
        input_norm=np.ones_like(layer.input_norm),
        qkv=reading(layer.qkv, layer.input_norm),
        output=rotation.columns(layer.output),
        output_bias=writing(layer.output_bias),
        mlp_norm=np.ones_like(layer.mlp_norm),
        gate_up=reading(layer.gate_up, layer.mlp_norm),
        down=rotation.columns(layer.down),
        down_bias=writing(layer.down_bias),
    )
    return rotated, replace(
        inputs, qkv=read(inputs.qkv, layer.input_norm), gate_up=read(inputs.gate_up, layer.mlp_norm)
    )


def hadamard(twos: int) -> Float32Array:
    """The symmetric Hadamard matrix of size 2 ** twos, scaled to be orthogonal."""
    signs = np.ones((1, 1), np.float32)
    for _ in range(twos):
        signs = np.kron(np.array([[1, 1], [1, -1]], np.float32), signs)
    return signs / np.float32(np.sqrt(1 << twos))


def _cosines(size: int) -> Float32Array:
    """The orthogonal discrete cosine transform, float32 [size, size]."""
    row, column = np.arange(size)[:, None], np.arange(size)
    matrix = np.cos(np.pi * (2 * row + 1) * column / (2 * size)) * np.sqrt(2 / size)
    matrix[:, 0] = np.sqrt(1 / size)
    orthogonal: Float32Array = matrix.astype(np.float32)
    return orthogonal
