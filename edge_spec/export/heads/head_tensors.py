"""The tensors of a head's checkpoint, each read with the shape that its configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edge_spec.errors import CheckpointError
from edge_spec.export.checkpoint import Float32Array, require_finite
from edge_spec.export.safetensors_file import SafetensorsFile


class HeadTensors:
    """What a head's files hold, by the names in there behind a prefix.

    Attributes:
        source: what the head is called.
    """

    def __init__(self, shards: Mapping[str, SafetensorsFile], source: str, prefix: str = "") -> None:
        """Look among the tensors whose names begin with ``prefix``; ``source`` names the checkpoint in messages."""
        self.source = source
        self._shards = shards
        self._prefix = prefix

    def under(self, prefix: str) -> HeadTensors:
        """The tensors of one part."""
        return HeadTensors(self._shards, self.source, self._prefix + prefix)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._shards

    def names(self) -> list[str]:
        """What there is, sorted."""
        start = len(self._prefix)
        return sorted(name[start:] for name in self._shards if name.startswith(self._prefix))

    def read(self, name: str, *shape: int) -> Float32Array:
        """Return a tensor of some shape as float32.

        Raises:
            CheckpointError: it is missing, of another shape, cut short or not finite.
            UnsupportedError: its elements are not F32, F16 or BF16.
        """
        full, shard = self._find(name, shape)
        return require_finite(shard.rows(full, 0, shape[0]), full, str(shard.path))

    def read_rows(self, name: str, start: int, stop: int, *shape: int) -> Float32Array:
        """Return some rows of a tensor of some shape, as :meth:`read` does."""
        full, shard = self._find(name, shape)
        return require_finite(shard.rows(full, start, stop), full, str(shard.path))

    def optional(self, name: str, *shape: int) -> Float32Array | None:
        """Return a tensor as :meth:`read` does, ``None`` if there is none."""
        return self.read(name, *shape) if name in self else None

    def integers(self, name: str, *shape: int) -> npt.NDArray[np.int64]:
        """Return whole numbers. Raises as :meth:`read` does."""
        full, shard = self._find(name, shape)
        return shard.integers(full)

    def rows_of(self, name: str) -> int:
        """The first size of a tensor. Raises CheckpointError if it is missing or a scalar."""
        full = self._prefix + name
        if full not in self._shards or not self._shards[full].tensors[full].shape:
            raise self._missing(full)
        return self._shards[full].tensors[full].shape[0]

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[str, SafetensorsFile]:
        full = self._prefix + name
        if full not in self._shards:
            raise self._missing(full)
        shard = self._shards[full]
        found = shard.tensors[full].shape
        if found != shape:
            raise CheckpointError(
                f"{shard.path}: tensor {full!r} has shape {list(found)}, expected {list(shape)} by config.json and the "
                "target; is it a head for this target?"
            )
        return full, shard

    def _missing(self, full: str) -> CheckpointError:
        return CheckpointError(f"{self.source} lacks tensor {full!r}; download or save the head again")
