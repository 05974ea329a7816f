"""Fetches checkpoints from the Hugging Face hub: only the files that an export reads, of one commit.

The hub's own client does it. It finds the token (``hf auth login``, ``HF_TOKEN``), keeps everything in its cache, takes
up a connection that broke where it broke, and shows how far it is.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_spec.byte_size import size_text
from edge_spec.errors import CheckpointError, MissingDependencyError
from edge_spec.export.hub_errors import explained
from edge_spec.export.hub_files import (
    CONFIG,
    INDEX,
    MEDUSA_WEIGHTS,
    SMALL,
    WEIGHTS,
    gguf_file,
    require_safetensors,
    shards,
)
from edge_spec.export.hub_name import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubCheckpoint:
    """A checkpoint that is here now.

    Attributes:
        path: a folder of config.json and safetensors, or a GGUF file, in the hub's cache.
        source: its name with the commit that was taken, which names the same files for ever.
    """

    path: Path
    source: str


@dataclass(frozen=True)
class _Repository:
    """One commit of a repository, on the hub or as much of it as is in the cache.

    Attributes:
        name: of the repository.
        commit: its hash.
        files: sizes in bytes of what it holds, by name.
        fetch: returns where a file of it lies, once it is here.
    """

    name: str
    commit: str
    files: Mapping[str, int]
    fetch: Callable[[str], Path]

    def get(self, file: str) -> Path:
        """Return where a file lies. Raises CheckpointError if there is none."""
        if file not in self.files:
            raise CheckpointError(f"{self.name!r} lacks the file {file!r}, which is needed")
        return self.fetch(file)


def fetch(name: HubName, offline: bool = False) -> HubCheckpoint:
    """Fetch a checkpoint from the hub, as far as it is not in the cache.

    Args:
        name: what to fetch.
        offline: look in the cache only, as with ``HF_HUB_OFFLINE``.

    Raises:
        CheckpointError: nothing goes by this name, access is refused, the network or the disk fails, or what is asked
            for is not in the cache.
        UnsupportedError: the repository has weights, but none that can be read.
        MissingDependencyError: huggingface-hub is not installed.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingDependencyError(
            f"fetching {str(name)!r} needs huggingface-hub: pip install 'edge-spec[export]'"
        ) from error
    with explained(name):
        if offline or constants.HF_HUB_OFFLINE:
            return _from_the_cache(name)
        if _COMMIT.fullmatch(name.revision or ""):  # its files never change, so nobody needs to be asked
            with suppress(CheckpointError, FileNotFoundError):
                return _from_the_cache(name)
        return _from_the_hub(name)


def _from_the_hub(name: HubName) -> HubCheckpoint:
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        name.repository, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if info.sha is None:
        raise CheckpointError(f"the hub does not say which commit {str(name)!r} is; check HF_ENDPOINT")
    commit = info.sha
    repository = _Repository(name.repository, commit, sizes, lambda file: _download(name.repository, file, commit))
    checkpoint = _complete(name, repository)
    # Now that it is whole, the cache may know which commit the name stands for; offline it is found by that.
    _download(name.repository, _main_file(name, repository), name.revision)
    return checkpoint


def _from_the_cache(name: HubName) -> HubCheckpoint:
    from huggingface_hub import snapshot_download

    # By an empty list of patterns the client is told not to miss the files that nobody asked for.
    folder = Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True, allow_patterns=[]))
    here = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    sizes = {file: path.stat().st_size for file, path in here.items()}
    try:
        return _complete(name, _Repository(name.repository, folder.name, sizes, here.__getitem__))
    except CheckpointError as error:
        raise type(error)(
            f"in the local cache, {error}; without --offline and HF_HUB_OFFLINE what is missing is fetched"
        ) from error


def _complete(name: HubName, repository: _Repository) -> HubCheckpoint:
    """Get every file that the checkpoint is read from."""
    main = _main_file(name, repository)
    if main.endswith(".gguf"):
        _require_space(repository, (main,))
        return HubCheckpoint(repository.get(main), f"{name.repository}/{main}@{repository.commit}")
    for file in SMALL:
        if file in repository.files:
            repository.get(file)
    weights = tuple(file for file in (WEIGHTS, MEDUSA_WEIGHTS) if file in repository.files)
    if INDEX in repository.files:
        weights = shards(repository.get(INDEX).read_bytes())
    _require_space(repository, weights)
    for file in weights:
        repository.get(file)
    return HubCheckpoint(repository.get(main).parent, f"{name.repository}@{repository.commit}")


def _main_file(name: HubName, repository: _Repository) -> str:
    """Return the file that stands for the checkpoint: the GGUF file, or the configuration."""
    if name.file is not None or name.quantization is not None:
        return gguf_file(name, repository.files)
    require_safetensors(name, repository.files)
    return CONFIG


def _download(repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file, revision=revision))


def _require_space(repository: _Repository, files: Iterable[str]) -> None:
    """Raise CheckpointError if those of the files that are not in the cache do not fit its disk."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = sum(
        repository.files.get(file, 0)
        for file in files
        if not isinstance(try_to_load_from_cache(repository.name, file, revision=repository.commit), str)
    )
    cache = Path(constants.HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if missing > free:
        raise CheckpointError(
            f"{size_text(missing)} of {repository.name!r} are to be fetched, but only {size_text(free)} are free where "
            f"the hub's cache is, {cache}; free some space, or have the cache elsewhere with HF_HOME"
        )
