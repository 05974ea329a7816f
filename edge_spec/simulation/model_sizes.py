"""What a decoding step of a model reads and computes, from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from edge_spec.errors import RequestError
from edge_spec.manifest import ArchitectureRecord, ModelRecord

_KV_BYTES = 2  # float16


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that decide.

    Attributes:
        layers, hidden_size, intermediate_size, heads, kv_heads, head_size: of the architecture.
        logits_size: columns of the logits.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    logits_size: int

    @classmethod
    def of(cls, architecture: ArchitectureRecord) -> ModelSizes:
        """The sizes of a bundle's model."""
        return cls(*(getattr(architecture, name) for name in cls.__dataclass_fields__))

    @property
    def attention_weights(self) -> int:
        """Weights of all projections to queries, keys and values, and back."""
        attended = self.heads * self.head_size
        return self.layers * self.hidden_size * (2 * attended + 2 * self.kv_heads * self.head_size)

    @property
    def mlp_weights(self) -> int:
        """Weights of one of the three projections of all gated MLPs."""
        return self.layers * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Weights of the projection to logits."""
        return self.hidden_size * self.logits_size

    @property
    def weights(self) -> int:
        """Weights that every row is multiplied by; the embedding, of which a row is looked up, is none of them."""
        return self.attention_weights + 3 * self.mlp_weights + self.head_weights

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that a call reads for each token in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_size * _KV_BYTES

    @property
    def attention_operations(self) -> int:
        """Floating-point operations of a row for each token in the cache."""
        return 4 * self.layers * self.heads * self.head_size


def weight_bytes(sizes: ModelSizes, model: ModelRecord) -> float:
    """Bytes of all matrices that a call reads, stored as the model's recipe says, on CUDA.

    Raises:
        RequestError: a matrix is stored in a way that no kernel of CUDA has.
    """
    block = int(model.recipe.get("block_size", 32))
    bits = {"int4": 4.0 + 16.0 / block, "fp16": 16.0}

    def stored(layer_class: str) -> float:
        name = str(model.recipe[layer_class])
        if name not in bits:
            raise RequestError(f"{layer_class} of {model.source} is stored as {name}, expected int4 or fp16 on CUDA.")
        return bits[name] / 8

    return (
        stored("attention") * sizes.attention_weights
        + (2 * stored("mlp_up") + stored("mlp_down")) * sizes.mlp_weights
        + stored("lm_head") * sizes.head_weights
    )
