"""A head's checkpoint on disk: a folder of config.json and safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from edge_spec.errors import CheckpointError
from edge_spec.export.checkpoint import weights_sha256
from edge_spec.export.heads.head_tensors import HeadTensors
from edge_spec.export.hub_files import MEDUSA_WEIGHTS
from edge_spec.export.huggingface_folder import HuggingFaceFolder
from edge_spec.export.metadata import Metadata
from edge_spec.export.safetensors_file import SafetensorsFile


class HeadFolder:
    """The configuration and the tensors.

    Attributes:
        source: what the head is called.
        config: config.json.
        tensors: by their names in the files.
    """

    def __init__(self, path: Path, source: str) -> None:
        """Read the configuration and where the tensors lie.

        Raises:
            CheckpointError: a file is missing, damaged or cut short, or the weights are no safetensors.
        """
        self.source = source
        folder = HuggingFaceFolder(path)
        self.config: Metadata = folder.config
        if not any(path.glob("*.safetensors")) and (pickled := sorted([*path.glob("*.bin"), *path.glob("*.pt")])):
            name = pickled[0].name
            to = MEDUSA_WEIGHTS if name.startswith("medusa") else "model.safetensors"
            raise CheckpointError(
                f"{path} holds its weights as {name}, a pickle, which could run anything when it is read; convert it "
                "where you trust it: from safetensors.torch import save_file; save_file({name: value.contiguous() for "
                f"name, value in torch.load('{name}').items()}}, '{to}')"
            )
        if (path / MEDUSA_WEIGHTS).is_file():
            file = SafetensorsFile(path / MEDUSA_WEIGHTS)
            self._shards = dict.fromkeys(file.tensors, file)
        else:
            self._shards = folder.shards
        self.tensors = HeadTensors(self._shards, source)

    def sha256(self) -> str:
        """Return the hex digest of the weight files' contents."""
        return weights_sha256(*sorted({shard.path for shard in self._shards.values()}))


def open_head_folder(source: str | os.PathLike[str], offline: bool = False) -> HeadFolder:
    """Open a head's checkpoint, fetched first if it is a name on the hub.

    Raises:
        CheckpointError: nothing is there, or what is there is unreadable, damaged or incomplete.
    """
    from edge_spec.export.hub import fetch
    from edge_spec.export.hub_name import parse_hub_name

    path = Path(os.path.expanduser(source))  # noqa: PTH111 - Path's own raises RuntimeError on an unknown ~user
    try:
        if path.is_dir():
            return HeadFolder(path, str(source))
        if not path.exists() and isinstance(source, str) and (name := parse_hub_name(source)) is not None:
            fetched = fetch(name, offline)
            if fetched.path.is_dir():
                return HeadFolder(fetched.path, fetched.source)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(source)!r}: {error.strerror or error}") from error
    raise CheckpointError(
        f"no head at {str(source)!r}; expected a folder with config.json and safetensors, or a hub id (owner/name)"
    )
