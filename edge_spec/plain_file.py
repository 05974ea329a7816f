"""Files inside a folder that came from somewhere else: opened only if they are what they look like."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import IO

_HASH_BLOCK = 1 << 22

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotPlainError(Exception):
    """Something else lies where a file is expected; the message says what and where."""


def open_plain(folder: Path, name: str) -> IO[bytes]:
    """Open a file below ``folder`` for reading, without ever waiting for it or leaving the folder.

    A symbolic link would lead out, opening a pipe waits for a writer, and opening a device can do anything.

    Args:
        folder: any path; a link to a folder is fine.
        name: relative, with forward slashes, without ``..``.

    Raises:
        NotPlainError: it, or a folder on the way to it, is something else.
        OSError: it is missing or may not be read.
    """
    parts = name.split("/")
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        _require(path, os.lstat(path), stat.S_IFREG if end == len(parts) else stat.S_IFDIR)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require(path, os.fstat(descriptor), stat.S_IFREG)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_regular(path: Path, within: Path) -> IO[bytes]:
    """Open a file of a downloaded folder for reading. Links are followed, but not to anywhere.

    The cache of the Hugging Face hub keeps a checkpoint's files in ``blobs``, and links to them in ``snapshots/NAME``.
    Newer clients keep what several checkpoints share in a folder ``blobs/XX`` beside all checkpoints, and link to that.

    Args:
        path: the file.
        within: the folder it belongs to.

    Raises:
        NotPlainError: it is no file, or leads out of the folder and is not of the hub's cache.
        OSError: it is missing or may not be read.
    """
    # Not Path.resolve, which raises RuntimeError on a loop of links before Python 3.13.
    home, real = Path(os.path.realpath(within)), Path(os.path.realpath(path, strict=True))
    checkpoint = home.parent.parent
    blobs = (checkpoint / "blobs", checkpoint.parent / "blobs" / real.parent.name)
    in_cache = within.parent.name == "snapshots" and real.parent in blobs
    if not real.is_relative_to(home) and not in_cache:
        raise NotPlainError(f"{path} is a link to {real}, outside of its folder")
    _require(path, real.stat(), stat.S_IFREG)
    return open_plain(real.parent, real.name)


def _require(path: Path, status: os.stat_result, kind: int) -> None:
    found = stat.S_IFMT(status.st_mode)
    if found != kind:
        wanted = "a file" if kind == stat.S_IFREG else "a folder"
        raise NotPlainError(f"{path} is {_KINDS.get(found, 'a file')}, expected {wanted}")


def file_size(file: IO[bytes]) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def sha256_of(*files: IO[bytes]) -> str:
    """Return the SHA-256 of what open files hold from here on, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_sha256(*paths: Path) -> str:
    """Return the SHA-256 of the files' contents, one after the other, in hexadecimal."""
    with ExitStack() as stack:
        return sha256_of(*(stack.enter_context(path.open("rb")) for path in paths))
