"""Weights that a session leaves in their file, and of which it reads a row now and then: the embedding."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
# From Linux's <asm-generic/mman-common.h>: the next read will be somewhere else.
_MADV_RANDOM = 1


def read_sparingly(file: Path, offset: int) -> None:
    """Have the system bring in no more of some mapped weights than is read; where it cannot be told, nothing happens.

    Around every row that is looked up, Linux maps what lies in its cache in one piece: 64 KiB of a file that was read
    in small steps, megabytes of one that has just been written, and soon the whole embedding. So what is cached of it
    is dropped, and read again page by page.

    Args:
        file: a file that this process has mapped.
        offset: where the weights lie in it.
    """
    with suppress(OSError, ValueError, AttributeError, TypeError):  # another system or C library
        path = os.path.realpath(file)
        madvise = ctypes.CDLL(None).madvise
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start, size, first in _mappings(path):
                if first <= offset < first + size:
                    madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_RANDOM)
                    os.posix_fadvise(descriptor, first, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _mappings(path: str) -> list[tuple[int, int, int]]:
    """Address, bytes and place in the file of each of its mappings."""
    found = []
    for line in _MAPS.read_text("utf-8", "surrogateescape").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5] == path:
            start, stop = (int(address, 16) for address in fields[0].split("-"))
            found.append((start, stop - start, int(fields[2], 16)))
    return found
