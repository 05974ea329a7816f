"""The one interface through which the exporter reads a checkpoint, whatever its file format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from edge_spec.errors import CheckpointError
from edge_spec.export.architecture import Architecture
from edge_spec.plain_file import file_sha256
from edge_spec.tokenizer_check import panics_as_errors, reason

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Vocabulary:
    """The text side of a checkpoint.

    Attributes:
        tokenizer: ready to encode and decode; special tokens are registered as such.
        size: number of usable ids; ids from here up to the embedding's rows are padding nobody may sample.
        eos_token_ids: ids that end a turn, sorted.
        bos_token_id: id that starts a text, if the model has one.
        special_token_ids: every control token's id, sorted.
        chat_template: Jinja source, or ``None``.
        named_tokens: the texts a chat template knows by name: ``bos_token``, ``eos_token``, ``unk_token``,
            ``pad_token``, as far as the model has them.
    """

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    special_token_ids: tuple[int, ...]
    chat_template: str | None
    named_tokens: Mapping[str, str] = field(default_factory=dict)


class Checkpoint(Protocol):
    """A model on disk, read one tensor at a time.

    Tensors go by their Hugging Face names without the ``model.`` prefix: ``embed_tokens.weight``,
    ``layers.3.self_attn.q_proj.weight``, ``norm.weight``, ``lm_head.weight`` (the embedding, if they are tied).
    Matrices are ``[out, in]``, and the rows of q and k are in the rotate-half order.
    """

    source: str
    architecture: Architecture
    default_sampling: Mapping[str, float]

    @property
    def vocabulary(self) -> Vocabulary:
        """The text side, built on first use."""
        ...

    def tensor(self, name: str) -> Float32Array:
        """Return one tensor as float32, an array of the caller's own.

        Raises:
            CheckpointError: it is missing, cut short or not finite.
        """
        ...

    def rows(self, name: str, start: int, stop: int) -> Float32Array:
        """Return rows ``start:stop`` of one matrix as float32, reading no more than those."""
        ...

    def sha256(self) -> str:
        """Return a hex digest that identifies the weights."""
        ...


def open_checkpoint(source: str | PathLike[str], context: int | None = None, offline: bool = False) -> Checkpoint:
    """Open a checkpoint, wherever it lies.

    Args:
        source: a ``.gguf`` file, a Hugging Face folder, or a name on the hub, from which it is fetched: ``owner/name``,
            ``owner/name/file.gguf`` or ``owner/name:Q4_K_M``, each with ``@revision`` if need be.
        context: positions that are wanted; ``None`` for as many as the model was trained for, which with LongRoPE is
            the shorter of its two contexts.
        offline: take what is named on the hub from its cache only.

    Raises:
        CheckpointError: nothing is there, or what is there is unreadable, damaged or incomplete.
        UnsupportedError: its architecture, tokenizer or quantization is not supported.
    """
    try:
        return _open(source, context, offline)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot read {str(source)!r}: {reason}; check the path and its permissions") from error


def _open(source: str | PathLike[str], context: int | None, offline: bool) -> Checkpoint:
    # The readers import their formats' packages, and this module's types.
    from edge_spec.export.gguf_checkpoint import GgufCheckpoint
    from edge_spec.export.hub import fetch
    from edge_spec.export.hub_name import parse_hub_name
    from edge_spec.export.huggingface import HuggingFaceCheckpoint

    path = Path(os.path.expanduser(source))  # noqa: PTH111 - Path's own raises RuntimeError on an unknown ~user
    if path.is_file():
        if path.name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            raise CheckpointError(f"{path} is one file of a Hugging Face checkpoint; give its folder {path.parent}")
        return GgufCheckpoint(path, context)
    if path.is_dir():
        if (path / "config.json").is_file():
            return HuggingFaceCheckpoint(path, context=context)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return GgufCheckpoint(files[0], context)
        found = f"{len(files)} .gguf files: name one of them" if files else "no .gguf file either"
        raise CheckpointError(f"the folder {path} holds no config.json (a Hugging Face checkpoint) and {found}")
    if isinstance(source, str) and (name := parse_hub_name(source)) is not None:
        fetched = fetch(name, offline)
        if fetched.path.is_dir():
            return HuggingFaceCheckpoint(fetched.path, fetched.source, context)
        return GgufCheckpoint(fetched.path, context, fetched.source)
    raise CheckpointError(
        f"no checkpoint at {str(source)!r}: there is no such file or folder, and it is no hub id (owner/name) either; "
        "give a .gguf file, a folder with config.json and safetensors, or a hub id"
    )


def encode_text(vocabulary: Vocabulary, text: str, source: str) -> list[int]:
    """Return the token ids of a text. Raises CheckpointError if the tokenizer cannot do its work."""
    try:
        with panics_as_errors():
            return list(vocabulary.tokenizer.encode(text).ids)
    except Exception as error:  # the package raises nothing more specific
        raise CheckpointError(f"the tokenizer of {source} fails: {reason(error)}") from error


def require_finite(values: Float32Array, name: str, where: str) -> Float32Array:
    """Return the values of a tensor. Raises CheckpointError if one of them is infinite or not a number."""
    flat = values.reshape(-1)
    # The sum of squares passes on what is not finite, in one read of the memory; where it is not finite, look closer.
    with np.errstate(over="ignore", invalid="ignore"):
        sound = np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all()
    if not sound:
        raise CheckpointError(
            f"{where} is damaged: tensor {name!r} holds values that are infinite or not a number; "
            "download or convert it again"
        )
    return values


def weights_sha256(*paths: Path) -> str:
    """Return the hex digest of the files that hold the weights. Raises CheckpointError if one is unreadable."""
    try:
        return file_sha256(*paths)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror or error}") from error
