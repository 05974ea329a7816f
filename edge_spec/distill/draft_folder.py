"""The folder of a draft that was trained earlier, to go on from."""

from __future__ import annotations

import os
from pathlib import Path

from edge_spec.distill.tiny_files import DRAFT_IDS
from edge_spec.distill.train_settings import Kind
from edge_spec.errors import CheckpointError

_CALLED: dict[Kind, str] = {"head": "a head", "tiny": "a tiny model"}


def require_draft(folder: str | os.PathLike[str], kind: Kind) -> None:
    """Raise CheckpointError if a folder obviously holds no draft of this kind; its reader looks closer."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds no draft, as there is no config.json; expected the folder {kind!r} in the working folder of "
            "an earlier run (--start-from)."
        )
    found: Kind = "tiny" if (path / DRAFT_IDS).exists() else "head"
    if found != kind:
        raise CheckpointError(
            f"{path} holds {_CALLED[found]}, not {_CALLED[kind]}; go on from it with --kind {found}, or name another "
            "(--start-from)."
        )
