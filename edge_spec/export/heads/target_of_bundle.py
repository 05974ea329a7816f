"""The target of a written bundle, as far as its heads share it: its embedding, its lm_head and its rotary tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.errors import EdgeSpecError
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.family import FAMILIES
from edge_spec.export.packing import INT8_BLOCK_SIZE, PackedEmbedding, PackedMatrix
from edge_spec.export.recipe import EmbeddingFormat, MatrixFormat
from edge_spec.export.rotation import Rotation
from edge_spec.manifest import Device, Manifest, ModelRecord

_BLOCK_PARTS = ("weight", "scale", "zero_point")


class TargetOfBundle:
    """What of a target lies in a bundle's folder, finished or not.

    Attributes:
        record: of the target.
        device: what its graphs run on.
        context_length: positions it is made for.
        vocab_size: its usable ids.
        rotation: of its residual stream, by which its embedding and lm_head are rotated; ``None`` if they are not.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Read the structure of the target's graph; no weights are in memory.

        Raises:
            EdgeSpecError: the target is one by way of optimum.
        """
        self.record: ModelRecord = manifest.target
        self.device: Device = manifest.device
        self.context_length = manifest.context_length
        self.vocab_size = manifest.vocab_size
        graph = self.record.graphs[0]
        if graph.via != "native":
            raise EdgeSpecError(
                "The bundle's target was exported by way of optimum, whose graphs do not tell hidden states; export it "
                "without --via optimum to add a head."
            )
        self.rotation = rotation_of_record(self.record)
        path = folder / graph.path
        self._folder = path.parent
        self._initializers = ir.load(path).graph.initializers

    def embedding(self) -> PackedEmbedding:
        """The stored embedding, whose rows are rotated where the target is."""
        storage = cast("EmbeddingFormat", self.record.recipe["embedding"])
        tensors = self._parts("embedding")
        return PackedEmbedding(storage, tensors, self._block_size(storage, INT8_BLOCK_SIZE))

    def lm_head(self) -> PackedMatrix:
        """The stored lm_head: rotated, and with the final norm's gain in it, where the target is rotated."""
        storage = cast("MatrixFormat", self.record.recipe["lm_head"])
        facts = self.record.architecture
        return PackedMatrix(
            storage, facts.hidden_size, facts.logits_size, self._parts("lm_head"), self._block_size(storage, 32)
        )

    def final_norm(self) -> Float32Array | None:
        """The gain of the final norm; ``None`` where it is in lm_head, out of which it cannot be taken."""
        if self.rotation is not None:
            return None
        return np.asarray(self._values(self._tensor("final_norm")), np.float32)

    def vector(self, name: str, values: npt.NDArray[Any]) -> ir.TensorProtocol | None:
        """The stored vector or table of this name, if it holds exactly these values."""
        value = self._initializers.get(name)
        stored = None if value is None else value.const_value
        if stored is None or tuple(stored.shape.numpy()) != values.shape:
            return None
        array = self._values(stored)
        return stored if np.array_equal(array, values.astype(array.dtype)) else None

    def embedding_rows(self, ids: Sequence[int]) -> Float32Array:
        """Some rows of the embedding as they are stored, float32 [ids, D]: rounded, and rotated where the target is."""
        packed = self.embedding()
        rows = {part: self._values(tensor)[list(ids)] for part, tensor in packed.tensors.items()}
        return _dequantized(rows, packed.format, packed.block_size)

    def lm_head_rows(self, start: int, stop: int) -> Float32Array:
        """Rows ``start:stop`` of lm_head as they are stored, float32 [rows, D]; see :meth:`lm_head`."""
        packed = self.lm_head()
        parts = {part: self._values(tensor) for part, tensor in packed.tensors.items()}
        if packed.format == "int4":
            rows = {part: values[start:stop].reshape(stop - start, -1) for part, values in parts.items()}
            return _dequantized(rows, "int4", packed.block_size)[:, : packed.inputs]
        columns = np.asarray(parts["weight"][:, start:stop], np.float32).T
        if packed.format != "w8a8":
            return columns
        middle = np.float32(128 if parts["weight"].dtype == np.uint8 else 0)
        return np.asarray((columns - middle) * parts["scale"][start:stop, None], np.float32)

    def _parts(self, name: str) -> dict[str, ir.TensorProtocol]:
        return {part: self._tensor(f"{name}.{part}") for part in _BLOCK_PARTS if f"{name}.{part}" in self._initializers}

    def _tensor(self, name: str) -> ir.TensorProtocol:
        tensor = self._initializers[name].const_value
        assert tensor is not None  # read from the file
        return tensor

    def _values(self, tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
        """What a stored tensor holds, mapped: the package itself refuses files that a bundle shares with another."""
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor.numpy()
        shape, file = tensor.shape.numpy(), self._folder / tensor.location
        return np.memmap(file, tensor.dtype.numpy(), "r", tensor.offset or 0, shape)

    def _block_size(self, storage: str, otherwise: int) -> int:
        return int(self.record.recipe.get("block_size", 32)) if storage == "int4" else otherwise


def rotation_of_record(record: ModelRecord) -> Rotation | None:
    """The rotation of a model's residual stream, as :func:`edge_spec.export.conditioning.rotation_of` has it."""
    matrices = (record.recipe[name] for name in ("attention", "mlp_up", "mlp_down", "lm_head"))
    family = next((family for family in FAMILIES if family.name == record.architecture.family), None)
    normed = family is not None and family.post_norms
    return Rotation(record.architecture.hidden_size) if "w8a8" in matrices and not normed else None


def _dequantized(rows: Mapping[str, npt.NDArray[Any]], storage: str, block_size: int) -> Float32Array:
    """Rows of the parts of a matrix in blocks, or not quantized at all, as float32."""
    weight, scale = rows["weight"], rows.get("scale")
    if scale is None:
        return np.asarray(weight, np.float32)
    bits = 4 if storage == "int4" else 8
    integers, zero = (_unpacked(part, bits) for part in (weight, rows.get("zero_point")))
    assert integers is not None
    zeros = np.full(scale.shape, 1 << (bits - 1)) if zero is None else zero[:, : scale.shape[1]]
    spread = (np.repeat(part, block_size, axis=1)[:, : integers.shape[1]] for part in (zeros, scale))
    zeros, scale = (np.asarray(part, np.float32) for part in spread)
    return (integers.astype(np.float32) - zeros) * scale


def _unpacked(values: npt.NDArray[Any] | None, bits: int) -> npt.NDArray[np.uint8] | None:
    """Integers of ``bits`` bits, one a byte."""
    if values is None or bits == 8:
        return values
    return np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
