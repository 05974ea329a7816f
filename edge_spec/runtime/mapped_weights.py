"""Weights that a session leaves in their file, and of which it reads a row now and then: the embedding."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from edge_spec.onnx_file import Tensor

_MAPS = Path("/proc/self/maps")
# From Linux's <asm-generic/mman-common.h>: the next read will be somewhere else.
_MADV_RANDOM = 1
_PAGE = 4096
# Pages that were asked for so long ago may have been dropped since.
_ASKED_SECONDS = 2.0


class SparseRows:
    """The rows of an embedding in its file, which are asked for just before a call reads them.

    A call that finds a row missing waits for the disk in the middle of its work. Where there are no more cores than
    threads, the thread that waited is often woken on a core where another computes, and the call takes twice its time.
    """

    def __init__(self, folder: Path, initializers: Mapping[str, Tensor]) -> None:
        """Have the embedding of a graph that a session has opened read page by page.

        Args:
            folder: of the graph.
            initializers: of the graph, checked; there may be no embedding in a file.
        """
        self._tables: list[_Table] = []
        for name, tensor in initializers.items():
            # Of these a text reads a row for each of its tokens; everything else is read in every call.
            if name.startswith("embedding.") and tensor.external is not None:
                place = tensor.external
                read_sparingly(folder / place.location, place.offset)
                with suppress(OSError):
                    row = place.length // max(tensor.shape[0], 1)
                    self._tables.append(_Table(folder / place.location, place.offset, row, place.length))

    def expect(self, token_ids: Sequence[int]) -> None:
        """Ask the system for the rows of tokens, as far as they were not asked for just before; return at once."""
        for table in self._tables:
            table.expect(token_ids)


class _Table:
    """One tensor with a row for each token."""

    def __init__(self, file: Path, offset: int, row_bytes: int, length: int) -> None:
        """Open the file; the tensor has ``length`` bytes from ``offset`` on."""
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._offset, self._row_bytes, self._length = offset, row_bytes, length
        self._forget()

    def _forget(self) -> None:
        self._asked = bytearray(self._length // _PAGE + 2)  # by page, from that where the tensor begins
        self._asked_since = time.monotonic()

    def expect(self, token_ids: Iterable[int]) -> None:
        """Ask for the rows of tokens."""
        if time.monotonic() - self._asked_since > _ASKED_SECONDS:
            self._forget()
        begin = self._offset // _PAGE
        for token in token_ids:
            first = self._offset + token * self._row_bytes
            if not self._offset <= first < self._offset + self._length:
                continue  # the call will tell
            page, last = first // _PAGE, (first + self._row_bytes - 1) // _PAGE
            if not (self._asked[page - begin] and self._asked[last - begin]):
                self._asked[page - begin : last - begin + 1] = b"\1" * (last - page + 1)
                with suppress(OSError, AttributeError):  # another system
                    os.posix_fadvise(self._descriptor, page * _PAGE, (last - page + 1) * _PAGE, os.POSIX_FADV_WILLNEED)


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
