"""Reads Medusa heads (Cai et al. 2024) as they are published (https://github.com/FasterDecoding/Medusa).

``medusa_lm_head.safetensors`` holds, for each head h from 0 on, ``{h}.{layer}.linear.weight`` [hidden, hidden] and
``.bias`` [hidden] of its residual blocks, and ``{h}.{layers}.weight`` [vocabulary, hidden], an lm_head of its own. All
may begin with ``medusa_head.``, as where they were saved together with the target.
"""

from __future__ import annotations

import re

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Float32Array
from edge_spec.export.heads.head_folder import HeadFolder
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.metadata import Metadata
from edge_spec.manifest import ArchitectureRecord

_PREFIXES = ("", "medusa_head.")
_HEAD = re.compile(r"(\d{1,4})\.\d{1,4}\.(?:linear\.)?(?:weight|bias)")

# Beyond these a file was not made for use: each head has as many weights as the target's lm_head.
_MOST_HEADS, _MOST_LAYERS = 16, 16


def is_medusa(config: Metadata, tensors: HeadTensors) -> bool:
    """Whether a checkpoint is one of such heads."""
    return "medusa_num_heads" in config or any(f"{prefix}0.0.linear.weight" in tensors for prefix in _PREFIXES)


class MedusaCheckpoint:
    """The heads of one target.

    Attributes:
        source: what they are called.
        sha256: which weights they are.
        heads: how many there are. From the hidden state of token p, head h says what token p + 2 + h is.
        layers: residual blocks of each.
    """

    def __init__(self, folder: HeadFolder, target: ArchitectureRecord) -> None:
        """Read the configuration, and count the heads.

        Args:
            folder: the checkpoint.
            target: sizes of the target.

        Raises:
            CheckpointError: there are no heads, or fewer than the configuration names.
            UnsupportedError: there are too many.
        """
        self.source, self.sha256 = folder.source, folder.sha256()
        self.layers = _at_most(folder.config, "medusa_num_layers", _MOST_LAYERS)
        self._target = target
        found = (prefix for prefix in _PREFIXES if _numbers(folder.tensors.under(prefix)))
        self._tensors = folder.tensors.under(next(found, ""))
        self.heads = self._count(_at_most(folder.config, "medusa_num_heads", _MOST_HEADS))

    def block(self, head: int, layer: int) -> tuple[Float32Array, Float32Array]:
        """Weight, float32 [hidden, hidden], and bias, float32 [hidden], of a residual block x + SiLU(W x + b).

        Raises:
            CheckpointError: one is missing, damaged or does not fit the target.
            UnsupportedError: it is stored in a way that is not read.
        """
        name, hidden = f"{head}.{layer}.linear.", self._target.hidden_size
        return self._tensors.read(name + "weight", hidden, hidden), self._tensors.read(name + "bias", hidden)

    def lm_head_rows(self, head: int, start: int, stop: int) -> Float32Array:
        """Rows ``start:stop`` of a head's own lm_head, float32 [stop - start, hidden]. Raises as :meth:`block`."""
        shape = self._target.logits_size, self._target.hidden_size
        return self._tensors.read_rows(f"{head}.{self.layers}.weight", start, stop, *shape)

    def _count(self, told: int) -> int:
        """How many heads there are, from the first on without a gap.

        Configurations of published heads name fewer (2 of 5), but never more.
        """
        found = _numbers(self._tensors)
        if found != set(range(len(found))) or not told <= len(found) <= _MOST_HEADS:
            raise CheckpointError(
                f"{self.source} holds the Medusa heads {sorted(found)[: _MOST_HEADS + 1]}, expected {told} to "
                f"{_MOST_HEADS} from 0 on, with tensors such as '0.0.linear.weight' and '0.{self.layers}.weight' "
                "(medusa_num_heads and medusa_num_layers in config.json); download the heads again"
            )
        return len(found)


def _numbers(tensors: HeadTensors) -> set[int]:
    return {int(match[1]) for match in map(_HEAD.fullmatch, tensors.names()) if match}


def _at_most(config: Metadata, key: str, most: int) -> int:
    number = config.integer(key, 1)
    if number > most:
        raise UnsupportedError(f"{config.where}: {key} is {number}, expected at most {most}")
    return number
