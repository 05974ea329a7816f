"""The float32 reference an export is measured against, run layer by layer while the layer's weights are in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
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
        self._hidden = embeddings
        self._cos, self._sin = rotary_tables(architecture.rope, architecture.head_size, len(embeddings))

    def run_layer(self, layer: DecoderLayer) -> LayerInputs:
        """Send the hidden states through one layer, and return what they brought to its matrices."""
        normed = self._norm(layer.input_norm)
        attended = self._attend(normed, layer)
        self._hidden = self._hidden + _linear(attended, layer.output, layer.output_bias)
        mlp_input = self._norm(layer.mlp_norm)
        gate, up = np.split(_linear(mlp_input, layer.gate_up, layer.gate_up_bias), 2, axis=1)
        activated = gate / (1 + np.exp(-gate)) * up
        self._hidden = self._hidden + _linear(activated, layer.down, layer.down_bias)
        return LayerInputs(normed, attended, mlp_input, activated)

    def final_hidden(self, gain: Float32Array) -> Float32Array:
        """Return the normalized final hidden states, float32 [tokens, hidden]."""
        return self._norm(gain)

    def _norm(self, gain: Float32Array) -> Float32Array:
        mean_square = np.mean(self._hidden**2, axis=1, keepdims=True)
        normed: Float32Array = self._hidden / np.sqrt(mean_square + np.float32(self._facts.norm_epsilon)) * gain
        return normed

    def _attend(self, x: Float32Array, layer: DecoderLayer) -> Float32Array:
        facts, tokens = self._facts, len(x)
        heads = facts.heads + 2 * facts.kv_heads
        qkv = _linear(x, layer.qkv, layer.qkv_bias).reshape(tokens, heads, facts.head_size).swapaxes(0, 1)
        query, key, value = np.split(qkv, [facts.heads, facts.heads + facts.kv_heads])
        group = facts.heads // facts.kv_heads
        key, value = np.repeat(self._rotate(key), group, axis=0), np.repeat(value, group, axis=0)
        scores = self._rotate(query) @ key.swapaxes(1, 2) / np.sqrt(np.float32(facts.head_size))
        scores[:, ~np.tri(tokens, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.ascontiguousarray((weights @ value).swapaxes(0, 1)).reshape(tokens, -1)

    def _rotate(self, x: Float32Array) -> Float32Array:
        first, second = np.split(x, 2, axis=2)
        return np.concatenate([first * self._cos - second * self._sin, second * self._cos + first * self._sin], axis=2)


def _linear(x: Float32Array, weight: Float32Array, bias: Float32Array | None) -> Float32Array:
    product = x @ weight.T
    return product if bias is None else product + bias
