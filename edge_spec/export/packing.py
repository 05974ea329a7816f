"""Matrices and layers in their storage format: quantized once, written once, used by every graph of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.mixing import run_length
from edge_spec.export.quantize import (
    quantize_blocks,
    quantize_blocks_by_importance,
    quantize_blocks_with_zero_points,
    quantize_channels,
)
from edge_spec.export.recipe import Device, EmbeddingFormat, MatrixFormat, Recipe
from edge_spec.export.rope import Rope
from edge_spec.export.smoothing import LayerImportance
from edge_spec.export.weights import Region, WeightFile

Float32Array = npt.NDArray[np.float32]
ReadRows = Callable[[int, int], Float32Array]
Parts = dict[str, npt.NDArray[Any]]

# Elements read, quantized and written at a time: bounds the float32 temporaries of the largest matrix.
_ELEMENTS_AT_ONCE = 1 << 24

# One row of the embedding is read for a token, so its scales cost no time.
INT8_BLOCK_SIZE = 32

_FLOAT_TYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class PackedMatrix:
    """A linear map [inputs -> outputs] as stored.

    Attributes:
        tensors: ``weight``, for the quantized formats also ``scale``, and for int4 perhaps ``zero_point``.
        block_size: inputs that share a scale, where the format has blocks.
        run: neighbouring inputs that are mixed (export/mixing.py), in weights as in activations; 1 for none.
    """

    format: MatrixFormat
    inputs: int
    outputs: int
    tensors: Mapping[str, ir.TensorProtocol]
    block_size: int
    run: int = 1


@dataclass(frozen=True)
class PackedEmbedding:
    """The token embedding as stored, one token per row; tensors and blocks as in :class:`PackedMatrix`."""

    format: EmbeddingFormat
    tensors: Mapping[str, ir.TensorProtocol]
    block_size: int


@dataclass(frozen=True)
class PackedLayer:
    """One decoder layer as stored; vectors are in the graph's compute type."""

    input_norm: ir.TensorProtocol
    qkv: PackedMatrix
    qkv_bias: ir.TensorProtocol | None
    q_norm: ir.TensorProtocol | None
    k_norm: ir.TensorProtocol | None
    output: PackedMatrix
    output_bias: ir.TensorProtocol | None
    post_attention_norm: ir.TensorProtocol | None
    mlp_norm: ir.TensorProtocol
    gate_up: PackedMatrix
    gate_up_bias: ir.TensorProtocol | None
    down: PackedMatrix
    down_bias: ir.TensorProtocol | None
    post_mlp_norm: ir.TensorProtocol | None


@dataclass(frozen=True)
class PackedModel:
    """A whole model as stored; ``rotary`` holds cos and sin, compute type [context + 1, elements rotated / 2]."""

    embedding: PackedEmbedding
    rotary: Mapping[Rope, tuple[ir.TensorProtocol, ir.TensorProtocol]]
    layers: tuple[PackedLayer, ...]
    final_norm: ir.TensorProtocol
    lm_head: PackedMatrix


class Packer:
    """Quantizes float32 weights by one recipe and appends them to the model's weight file."""

    def __init__(self, weights: WeightFile, recipe: Recipe, device: Device, signed_integers: bool) -> None:
        """Pack for one model.

        Args:
            weights: file that receives the bytes.
            recipe: format of each layer class.
            device: decides the compute type (of vectors and scales), and whether int4 blocks have zero points:
                CUDA's kernel for several rows takes symmetric ones only.
            signed_integers: whether w8a8 weights are int8 rather than uint8 around 128.
        """
        self._weights = weights
        self._recipe = recipe
        self._compute_dtype = np.float32 if device == "cpu" else np.float16
        self._zero_points = device == "cpu"
        self._signed_integers = signed_integers
        self._vectors: dict[bytes, ir.ExternalTensor] = {}

    def vector(self, name: str, values: Float32Array) -> ir.TensorProtocol:
        """Store a norm gain, a bias or a table in the compute type. Equal ones, such as gains of one, share bytes."""
        stored = values.astype(self._compute_dtype)
        key = hashlib.sha256(stored.tobytes()).digest()
        if key in self._vectors:
            return self._weights.alias(self._vectors[key], name, stored.shape)
        self._vectors[key] = self._weights.append(name, stored)
        return self._vectors[key]

    def layer(self, index: int, layer: DecoderLayer, importance: LayerImportance | None = None) -> PackedLayer:
        """Store one decoder layer; int4 blocks are fitted to how large the inputs are, if that is known."""
        prefix = f"layers.{index}."

        def matrix(name: str, weight: Float32Array, storage: MatrixFormat, mixed: bool = False) -> PackedMatrix:
            known = None if importance is None else getattr(importance, name)
            return self.matrix(
                prefix + name, weight.shape, lambda start, stop: weight[start:stop], storage, known, mixed
            )

        def vector(name: str, values: Float32Array | None) -> ir.TensorProtocol | None:
            return None if values is None else self.vector(prefix + name, values)

        recipe = self._recipe
        return PackedLayer(
            input_norm=self.vector(prefix + "input_norm", layer.input_norm),
            qkv=matrix("qkv", layer.qkv, recipe.attention),
            qkv_bias=vector("qkv.bias", layer.qkv_bias),
            q_norm=vector("q_norm", layer.q_norm),
            k_norm=vector("k_norm", layer.k_norm),
            output=matrix("output", layer.output, recipe.attention),
            output_bias=vector("output.bias", layer.output_bias),
            post_attention_norm=vector("post_attention_norm", layer.post_attention_norm),
            mlp_norm=self.vector(prefix + "mlp_norm", layer.mlp_norm),
            gate_up=matrix("gate_up", layer.gate_up, recipe.mlp_up),
            gate_up_bias=vector("gate_up.bias", layer.gate_up_bias),
            down=matrix("down", layer.down, recipe.mlp_down, mixed=True),
            down_bias=vector("down.bias", layer.down_bias),
            post_mlp_norm=vector("post_mlp_norm", layer.post_mlp_norm),
        )

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        read_rows: ReadRows,
        storage: MatrixFormat,
        importance: Float32Array | None = None,
        mixed: bool = False,
    ) -> PackedMatrix:
        """Store one matrix [out, in] in a format of its own, reading some of its rows at a time.

        With ``mixed``, neighbouring inputs are mixed where activations are rounded by the row.
        """
        outputs, inputs = shape
        run = run_length(inputs) if mixed and storage == "w8a8" else 1

        def quantize(rows: Float32Array) -> Parts:
            if storage == "int4":
                return self._int4(rows, importance)
            if storage == "w8a8":
                integers = quantize_channels(rows, self._signed_integers, run)
                return dict(zip(("weight", "scale"), integers, strict=True))
            return {"weight": rows.T.astype(_FLOAT_TYPES[storage])}

        # Weights multiply from the right, so that outputs are columns; int4 kernels want them as rows.
        axis = 0 if storage == "int4" else -1
        tensors = self._store(name, shape, read_rows, quantize, axis)
        return PackedMatrix(storage, inputs, outputs, tensors, self._recipe.block_size, run)

    def lm_head(
        self, shape: tuple[int, int], read_rows: ReadRows, importance: Float32Array | None = None
    ) -> PackedMatrix:
        """Store the output projection [vocab, hidden], reading a few thousand rows at a time."""
        return self.matrix("lm_head", shape, read_rows, self._recipe.lm_head, importance)

    def embedding(
        self, shape: tuple[int, int], read_rows: ReadRows, tied_lm_head: PackedMatrix | None
    ) -> PackedEmbedding:
        """Store the embedding [vocab, hidden]; where lm_head is tied and holds the same blocks, share its bytes."""
        storage = self._recipe.embedding
        vocab_size, hidden_size = shape
        block_size = self._recipe.block_size if storage == "int4" else INT8_BLOCK_SIZE
        if tied_lm_head is not None and storage == tied_lm_head.format == "int4" and hidden_size % block_size == 0:
            weight = tied_lm_head.tensors["weight"]
            assert isinstance(weight, ir.ExternalTensor)  # everything packed lies in the weight file
            flat = self._weights.alias(weight, "embedding.weight", (vocab_size, hidden_size // 2))
            return PackedEmbedding(storage, {**tied_lm_head.tensors, "weight": flat}, block_size)

        def quantize(rows: Float32Array) -> Parts:
            if storage in ("fp32", "fp16"):
                return {"weight": rows.astype(_FLOAT_TYPES[storage])}
            parts = self._int4(rows) if storage == "int4" else self._int8(rows, block_size)
            # Rows are looked up whole, so the padding of the last block must go.
            row_bytes = hidden_size if storage == "int8" else hidden_size // 2
            return {**parts, "weight": parts["weight"].reshape(len(rows), -1)[:, :row_bytes]}

        return PackedEmbedding(storage, self._store("embedding", shape, read_rows, quantize, 0), block_size)

    def _int4(self, rows: Float32Array, importance: Float32Array | None = None) -> Parts:
        block_size = self._recipe.block_size
        if importance is not None:
            fitted = quantize_blocks_by_importance(rows, importance, block_size, self._zero_points)
            return dict(zip(("weight", "scale", "zero_point"), fitted, strict=False))
        if self._zero_points:
            parts = quantize_blocks_with_zero_points(rows, block_size)
            return dict(zip(("weight", "scale", "zero_point"), parts, strict=True))
        return dict(zip(("weight", "scale"), quantize_blocks(rows, 4, block_size), strict=True))

    @staticmethod
    def _int8(rows: Float32Array, block_size: int) -> Parts:
        return dict(zip(("weight", "scale"), quantize_blocks(rows, 8, block_size), strict=True))

    def _store(
        self,
        name: str,
        shape: tuple[int, ...],
        read_rows: ReadRows,
        quantize: Callable[[Float32Array], Parts],
        axis: int,
    ) -> dict[str, ir.TensorProtocol]:
        """Write the parts of a matrix, some of its rows at a time; scales are in the compute type.

        Args:
            name: of the matrix.
            shape: of the matrix, ``[out, in]``.
            read_rows: gives its rows.
            quantize: what becomes of some rows.
            axis: of every part, along which the rows lie.
        """
        count, columns = shape
        step = max(1, _ELEMENTS_AT_ONCE // columns)
        regions: dict[str, Region] = {}
        for start in range(0, count, step):
            for part, piece in quantize(read_rows(start, min(start + step, count))).items():
                stored = piece.astype(self._compute_dtype) if part == "scale" else piece
                if part not in regions:
                    whole = list(stored.shape)
                    whole[axis] = count
                    regions[part] = self._weights.reserve(f"{name}.{part}", stored.dtype, whole)
                regions[part].write(stored, start, axis)
        return {part: region.tensor for part, region in regions.items()}
