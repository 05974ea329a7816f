"""A folder that appears whole or not at all, whatever happens to the process that writes it.

It is filled under another name beside its place, and then takes its place in one step. A lock on the unfinished folder,
which ends with its process, tells the leftovers of a killed one from the work of another.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_INNER = "bundle"


@contextmanager
def new_folder(
    final: Path, require_replaceable: Callable[[Path], None], expected: frozenset[str]
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Give a temporary folder to fill, and a function to call when it is whole; then it moves to ``final``.

    Args:
        final: where it is to appear. A folder that is there already is replaced.
        require_replaceable: raises if what is at a path must not be replaced; a path where nothing is passes.
        expected: names of what may lie in such a folder. Leftovers that hold anything else are not touched.

    Raises:
        OSError: a folder cannot be created or moved.
    """
    recover(final)
    require_replaceable(final)
    new_parents = [parent for parent in final.parents if not parent.exists()]
    whole = False

    def finish() -> None:
        nonlocal whole
        whole = True

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final, expected)
        with _locked_folder(final, "partial") as staging:
            try:
                yield staging, finish
                if whole:
                    require_replaceable(final)  # somebody else may have put something there meanwhile
                    _move_into_place(staging, final, require_replaceable)
            finally:
                if staging.is_symlink():  # what stood in its place
                    staging.unlink()
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        if not final.exists():
            for parent in new_parents:  # the innermost first
                with suppress(OSError):  # somebody else has put something there
                    parent.rmdir()


def recover(final: Path) -> None:
    """Put back a folder whose replacement was killed half way, where the file system cannot exchange two folders."""
    if os.path.lexists(final):
        return
    for folder in _beside(final, "old"):
        with _lock(folder) as lock, suppress(OSError):  # somebody else was faster
            if lock == "ours":
                (folder / _INNER).rename(final)
                folder.rmdir()


def exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one step; ``False`` if the system or the file system cannot do that."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    if function(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _move_into_place(staging: Path, final: Path, require_replaceable: Callable[[Path], None]) -> None:
    if not final.exists():
        staging.rename(final)  # fails if a folder with something in it has come up there
        return
    if exchange(staging, final):
        try:
            require_replaceable(staging)  # what was there until this moment
        except BaseException:
            exchange(staging, final)
            raise
        return
    with _locked_folder(final, "old") as retired:
        old = retired / _INNER
        try:
            final.rename(old)
            staging.rename(final)  # killed before this, the next one to come along puts the old one back
        except BaseException:
            if old.exists():
                old.rename(final)
            retired.rmdir()
            raise
        shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def _locked_folder(final: Path, purpose: str) -> Iterator[Path]:
    """Create a folder beside ``final`` and hold its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.{purpose}-", dir=final.parent))
        with _lock(folder) as lock:
            # Somebody tidying up may have taken it for a leftover before it was locked.
            if lock != "theirs" and folder.exists():
                yield folder
                return


@contextmanager
def _lock(folder: Path) -> Iterator[Literal["ours", "theirs", "unknown"]]:
    """Lock a folder unless somebody else has. The lock goes with the process, however that ends."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield "theirs"
        return
    lock: Literal["ours", "theirs", "unknown"] = "ours"
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks nobody can tell who is alive, so there nothing is tidied up.
            lock = "theirs" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else "unknown"
        yield lock
    finally:
        os.close(descriptor)


def _remove_leftovers(final: Path, expected: frozenset[str]) -> None:
    """Remove what exporters that were killed have left beside ``final``."""
    for purpose, names in (("partial", expected), ("old", frozenset({_INNER}))):
        for folder in _beside(final, purpose):
            with _lock(folder) as lock, suppress(OSError):
                if lock == "ours" and names.issuperset(path.name for path in folder.iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)


def _beside(final: Path, purpose: str) -> Sequence[Path]:
    """The temporary folders of ``final`` for one purpose."""
    pattern = re.compile(rf"\.{re.escape(final.name)}\.{purpose}-\w{{8}}")
    try:
        return [path for path in final.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return ()
