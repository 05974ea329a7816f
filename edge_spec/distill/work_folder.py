"""The working folder of a distillation, which one run at a time has for itself."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_spec.errors import EdgeSpecError


@contextmanager
def work_folder(path: Path) -> Iterator[None]:
    """Create the folder if need be, and keep other runs out of it; the lock ends with the process, however that ends.

    Raises:
        EdgeSpecError: it cannot be created, or another run is at work in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EdgeSpecError(
            f"{path} cannot be written ({error.strerror or error}); name another working folder (--work)."
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks cannot tell.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise EdgeSpecError(
                    f"Another run is at work in {path}; let it finish or end it, or name another folder (--work)."
                ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors_told(folder: Path, *others: type[Exception]) -> Iterator[None]:
    """Around what writes into a working folder: whatever the disk says becomes an error of ours.

    What is being written beside its place (``.NAME.new``) is removed.

    Args:
        folder: that is written into.
        others: what else the libraries that write raise for it.

    Raises:
        EdgeSpecError: it could not be written.
    """
    failures: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except failures as error:
        for leftover in folder.glob(".*.new"):
            leftover.unlink(missing_ok=True)
        # What is no OSError tells where in a library it was found, not why.
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise EdgeSpecError(
            f"{folder} cannot be written ({reason}); free some space and start the run again: it goes on where it was "
            "saved."
        ) from None
