"""Medusa heads on disk, as their authors publish them (Cai et al. 2024, https://github.com/FasterDecoding/Medusa).

A folder of ``config.json`` and ``medusa_lm_head.safetensors``, whose tensors are, for each head h from 0 on:
``{h}.{layer}.linear.weight`` [hidden, hidden] and ``.bias`` [hidden] of its residual blocks, and
``{h}.{layers}.weight`` [vocabulary, hidden], an lm_head of its own. All may begin with ``medusa_head.``, as where they
were saved together with the target.
"""

from __future__ import annotations

import re
from pathlib import Path

from edge_spec.errors import CheckpointError, PairError, UnsupportedError
from edge_spec.export.architecture import Architecture
from edge_spec.export.checkpoint import Float32Array, require_finite, weights_sha256
from edge_spec.export.huggingface_folder import read_json
from edge_spec.export.metadata import Metadata
from edge_spec.export.safetensors_file import SafetensorsFile

# Where heads lie, the published name first.
WEIGHTS = ("medusa_lm_head.safetensors", "model.safetensors")
_PREFIXES = ("", "medusa_head.")
_HEAD = re.compile(r"(\d{1,4})\.\d{1,4}\.(?:linear\.)?(?:weight|bias)")

# Beyond these a file was not made for use: each head has as many weights as the target's lm_head.
MOST_HEADS, MOST_LAYERS = 16, 16


class MedusaCheckpoint:
    """The heads of one target.

    Attributes:
        source: what they are called.
        heads: how many there are; head h says what comes h + 2 tokens behind the one whose hidden state it reads.
        layers: residual blocks of each.
        base_model: the target that they were trained for, as far as they say.
    """

    def __init__(self, folder: Path, target: Architecture, source: str | None = None) -> None:
        """Read the configuration, and check that every tensor is there and fits the target.

        Args:
            folder: where config.json and the weights lie.
            target: sizes of the target.
            source: what the heads are called, if not by their folder.

        Raises:
            CheckpointError: a file is missing, damaged or incomplete.
            PairError: they were made for another target.
            UnsupportedError: the weights are stored in a way that is not read.
        """
        self.source = str(folder) if source is None else source
        config = read_json(folder / "config.json")
        self.layers = _at_most(config, "medusa_num_layers", MOST_LAYERS, default=1)
        self.base_model = config.text("base_model_name_or_path", "")
        self._file = _open_weights(folder)
        self._prefix = self._find_prefix()
        self.heads = self._count_heads(_at_most(config, "medusa_num_heads", MOST_HEADS, default=1))
        self._check_tensors(target)

    def block(self, head: int, layer: int) -> tuple[Float32Array, Float32Array]:
        """Weight, float32 [hidden, hidden], and bias, float32 [hidden], of a residual block x + SiLU(W x + b)."""
        name = f"{head}.{layer}.linear."
        return self._rows(name + "weight"), self._rows(name + "bias")

    def lm_head_rows(self, head: int, start: int, stop: int) -> Float32Array:
        """Rows ``start:stop`` of a head's own lm_head, float32 [stop - start, hidden]."""
        return self._rows(f"{head}.{self.layers}.weight", start, stop)

    def sha256(self) -> str:
        """The hex digest of the weight file."""
        return weights_sha256(self._file.path)

    def _rows(self, name: str, start: int = 0, stop: int | None = None) -> Float32Array:
        stored = self._prefix + name
        stop = self._file.tensors[stored].shape[0] if stop is None else stop
        return require_finite(self._file.rows(stored, start, stop), stored, str(self._file.path))

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if any(_HEAD.fullmatch(name.removeprefix(prefix)) for name in self._named(prefix)):
                return prefix
        raise CheckpointError(
            f"{self._file.path} holds no Medusa heads: expected tensors such as '0.0.linear.weight' and "
            f"'0.{self.layers}.weight', perhaps behind 'medusa_head.'; give the folder of published heads"
        )

    def _named(self, prefix: str) -> list[str]:
        return [name for name in self._file.tensors if name.startswith(prefix)]

    def _count_heads(self, told: int) -> int:
        """How many heads the file holds, from the first on without a gap.

        Configurations of published heads name fewer than there are (2 of 5), but never more.
        """
        matches = (_HEAD.fullmatch(name.removeprefix(self._prefix)) for name in self._named(self._prefix))
        found = {int(match[1]) for match in matches if match}
        if found != set(range(len(found))) or not told <= len(found) <= MOST_HEADS:
            raise CheckpointError(
                f"{self._file.path} holds the heads {sorted(found)[: MOST_HEADS + 1]}, expected {told} to {MOST_HEADS} "
                "from 0 on, as config.json says (medusa_num_heads); download the heads again"
            )
        return len(found)

    def _check_tensors(self, target: Architecture) -> None:
        hidden = target.hidden_size
        expected: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for layer in range(self.layers):
                expected[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
                expected[f"{head}.{layer}.linear.bias"] = (hidden,)
            expected[f"{head}.{self.layers}.weight"] = (target.logits_size, hidden)
        for name, shape in expected.items():
            tensor = self._file.tensors.get(self._prefix + name)
            if tensor is None:
                raise CheckpointError(
                    f"{self._file.path} lacks tensor {self._prefix + name!r} of heads with {self.layers} residual "
                    "blocks (medusa_num_layers in config.json) and an lm_head each; download the heads again"
                )
            if tensor.shape != shape:
                trained = f" They were trained for {self.base_model[:200]!r}." if self.base_model else ""
                raise PairError(
                    f"{self.source} does not fit the target: tensor {self._prefix + name!r} has shape {tensor.shape}, "
                    f"expected {shape}.{trained}"
                )
            self._file.require_readable(self._prefix + name)


def _at_most(config: Metadata, key: str, most: int, default: int) -> int:
    number = config.integer(key, default)
    if number > most:
        raise UnsupportedError(f"{config.where}: {key} is {number}, expected at most {most}")
    return number


def _open_weights(folder: Path) -> SafetensorsFile:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return SafetensorsFile(folder / name)
    if (folder / "medusa_lm_head.pt").is_file():
        raise UnsupportedError(
            f"{folder} holds its heads as medusa_lm_head.pt, a pickle, which can run code when it is read; convert it "
            "where you trust it: safetensors.torch.save_file({name: tensor.clone() for name, tensor in "
            "torch.load('medusa_lm_head.pt', weights_only=True).items()}, 'medusa_lm_head.safetensors')"
        )
    raise CheckpointError(f"{folder} holds no {WEIGHTS[0]}; give the folder of Medusa heads with config.json beside it")
