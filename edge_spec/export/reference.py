"""The float32 reference an export is measured against, run layer by layer while the layer's weights are in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Activation, Architecture, LayerAttention
from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.rope import rotary_tables

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerInputs:
    """What a text's tokens bring to each matrix of a layer, float32 [tokens, in]."""

    qkv: Float32Array
    output: Float32Array
    gate_up: Float32Array
    down: Float32Array


class Float32Reference:
    """Carries the hidden states of one text through the model, so that the whole model is never held in float32."""

    def __init__(self, architecture: Architecture, embeddings: Float32Array) -> None:
        """Start from the text's embeddings, float32 [tokens, hidden]."""
        self._facts = architecture
        self._hidden = embeddings * np.float32(architecture.embedding_scale)
        self._rotary = {rope: rotary_tables(rope, len(embeddings)) for rope in architecture.ropes}
        self._layer = 0

    def run_layer(self, layer: DecoderLayer) -> LayerInputs:
        """Send the hidden states through the next layer, and return what they brought to its matrices."""
        attention, epsilon = self._facts.attention[self._layer], np.float32(self._facts.norm_epsilon)
        self._layer += 1
        normed = _norm(self._hidden, layer.input_norm, epsilon)
        attended = self._attend(normed, layer, attention)
        self._add(_linear(attended, layer.output, layer.output_bias), layer.post_attention_norm)
        mlp_input = _norm(self._hidden, layer.mlp_norm, epsilon)
        gate, up = np.split(_linear(mlp_input, layer.gate_up, layer.gate_up_bias), 2, axis=1)
        activated = _ACTIVATIONS[self._facts.activation](gate) * up
        self._add(_linear(activated, layer.down, layer.down_bias), layer.post_mlp_norm)
        return LayerInputs(normed, attended, mlp_input, activated)

    def final_hidden(self, gain: Float32Array) -> Float32Array:
        """Return the normalized final hidden states, float32 [tokens, hidden]."""
        return _norm(self._hidden, gain, np.float32(self._facts.norm_epsilon))

    def _add(self, update: Float32Array, gain: Float32Array | None) -> None:
        if gain is not None:
            update = _norm(update, gain, np.float32(self._facts.norm_epsilon))
        self._hidden = self._hidden + update

    def _attend(self, x: Float32Array, layer: DecoderLayer, attention: LayerAttention) -> Float32Array:
        facts, tokens = self._facts, len(x)
        heads = facts.heads + 2 * facts.kv_heads
        qkv = _linear(x, layer.qkv, layer.qkv_bias).reshape(tokens, heads, facts.head_size).swapaxes(0, 1)
        query, key, value = np.split(qkv, [facts.heads, facts.heads + facts.kv_heads])
        if layer.q_norm is not None and layer.k_norm is not None:
            epsilon = np.float32(facts.norm_epsilon)
            query, key = _norm(query, layer.q_norm, epsilon), _norm(key, layer.k_norm, epsilon)
        if attention.rope is not None:
            tables = self._rotary[attention.rope]
            query, key = _rotate(query, *tables), _rotate(key, *tables)
        group = facts.heads // facts.kv_heads
        key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
        scale = facts.head_size**-0.5 if facts.attention_scale is None else facts.attention_scale
        scores = query @ key.swapaxes(1, 2) * np.float32(scale)
        seen = np.tri(tokens, dtype=bool)
        if attention.window is not None:
            seen &= ~np.tri(tokens, k=-attention.window, dtype=bool)
        scores[:, ~seen] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.ascontiguousarray((weights @ value).swapaxes(0, 1)).reshape(tokens, -1)


def _silu(x: Float32Array) -> Float32Array:
    activated: Float32Array = x / (1 + np.exp(-x))
    return activated


def _gelu_tanh(x: Float32Array) -> Float32Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    activated: Float32Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated


_ACTIVATIONS: dict[Activation, Callable[[Float32Array], Float32Array]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def _norm(x: Float32Array, gain: Float32Array, epsilon: np.float32) -> Float32Array:
    """RMS norm over the last axis."""
    normed: Float32Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * gain
    return normed


def _rotate(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Rotate the first elements of heads, float32 [heads, tokens, head_size], as many as the tables are for."""
    half = cos.shape[1]
    first, second, rest = np.split(x, [half, 2 * half], axis=2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=2)


def _linear(x: Float32Array, weight: Float32Array, bias: Float32Array | None) -> Float32Array:
    product = x @ weight.T
    return product if bias is None else product + bias
