"""What usually follows a few tokens, learned from one text after the other in a fixed amount of memory.

On disk a table is one file, all of it little-endian:

| bytes | what |
|---|---|
| 8 | ``EDGENGRM`` |
| 4 | version, 1 |
| 4 | CRC-32 of everything after it |
| 4, 4 | vocabulary size, number of contexts n |
| 2, then as many | length of the tokenizer's name, and the name in UTF-8 |
| 8 n | key of each context |
| 12 n | the 3 tokens that followed it, the most frequent first |
| 3 n | how often each did; 0: no such token |

The tokens are those of texts that were generated: the file is as private as they are.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import BundleError, RequestError

SHORTEST, LONGEST = 2, 4  # tokens of the contexts that are kept
SUCCESSORS = 3  # tokens kept for each context

_MAX_COUNT = 255
_MAX_SLOT_BITS = 22
_MAX_NAME_BYTES = 1024
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads keys evenly over the slots
_KEY_MASK = 2**64 - 1

_MAGIC = b"EDGENGRM"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_SIZES = struct.Struct("<IIH")
_CONTEXT_BYTES = 8 + 5 * SUCCESSORS
_MAX_FILE_BYTES = _PREFIX.size + _SIZES.size + _MAX_NAME_BYTES + _CONTEXT_BYTES * 2**_MAX_SLOT_BITS


class Successors(NamedTuple):
    """What followed a context.

    Attributes:
        context: tokens of the context; 0: none is known.
        tokens: the tokens that followed it, the most frequent first.
        counts: how often each did, so far as is remembered.
    """

    context: int
    tokens: list[int]
    counts: list[int]


class NgramTable:
    """Counts which tokens follow contexts of 2 to 4 tokens. Its memory is fixed, whatever it learns.

    A context has one slot, which it shares with others, and they vote for it (Boyer and Moore 1981): a context that
    finds another one there takes a count from it, and takes the slot once nothing is left. So what is seen often stays,
    and what is not seen any more goes. The same vote decides which tokens are kept for a context.

    Args:
        tokenizer: names the tokenizer, such as its digest: a saved table is refused for another one.
        vocab_size: token ids are below.
        slot_bits: the table has ``2**slot_bits`` slots of 23 bytes; a learned token wants 3 of them.

    Raises:
        RequestError: an argument is out of range.
    """

    def __init__(self, tokenizer: str, vocab_size: int, slot_bits: int = 16) -> None:
        if len(tokenizer.encode()) > _MAX_NAME_BYTES:
            raise RequestError(f"the tokenizer's name takes more than {_MAX_NAME_BYTES} bytes; expected a digest")
        if not 1 <= vocab_size < 2**32:
            raise RequestError(f"vocab_size is {vocab_size!r}, expected 1 to 2**32 - 1")
        if not 1 <= slot_bits <= _MAX_SLOT_BITS:
            raise RequestError(f"slot_bits is {slot_bits!r}, expected 1 to {_MAX_SLOT_BITS}")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._shift = 64 - slot_bits  # the first bits of a key are its slot
        slots = 2**slot_bits
        self._keys = array("Q", bytes(8 * slots))
        self._tokens = array("I", bytes(4 * slots * SUCCESSORS))
        self._counts = bytearray(slots * SUCCESSORS)

    @property
    def contexts(self) -> int:
        """How many contexts are kept now."""
        return len(self._entries()[0])

    @property
    def memory_bytes(self) -> int:
        """Memory held, in bytes: always the same."""
        return sum(map(sys.getsizeof, (self._keys, self._tokens, self._counts)))

    def learn(self, tokens: Sequence[int], start: int = 0) -> None:
        """Count every token of a text from ``tokens[start]`` on as following the tokens before it."""
        for end in range(max(start, SHORTEST), len(tokens)):
            for _, key in _keys(tokens[max(end - LONGEST, 0) : end]):
                self._count(key, tokens[end])

    def successors(self, tokens: Sequence[int]) -> Successors:
        """What followed the longest known context that ``tokens`` end with."""
        found = Successors(0, [], [])
        for context, key in _keys(tokens[-LONGEST:]):
            slot = key >> self._shift
            if self._keys[slot] == key:
                first = slot * SUCCESSORS
                counts = [count for count in self._counts[first : first + SUCCESSORS] if count]
                found = Successors(context, self._tokens[first : first + len(counts)].tolist(), counts)
        return found

    def save(self, path: str | Path) -> None:
        """Write the table to a file, whole or not at all.

        Raises:
            BundleError: the file cannot be written.
        """
        path = Path(path)
        keys, tokens, counts = self._entries()
        name = self._tokenizer.encode()
        body = b"".join(
            (
                _SIZES.pack(self._vocab_size, len(keys), len(name)),
                name,
                keys.astype("<u8").tobytes(),
                tokens.astype("<u4").tobytes(),
                counts.tobytes(),
            )
        )
        try:
            handle, partial = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_PREFIX.pack(_MAGIC, _VERSION, zlib.crc32(body)) + body)
                    file.flush()
                    os.fsync(file.fileno())
                Path(partial).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(partial).unlink()
                raise
        except OSError as error:
            raise BundleError(f"the n-gram table {path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path, tokenizer: str, vocab_size: int, slot_bits: int = 16) -> NgramTable:
        """Read a table that was saved, into ``2**slot_bits`` slots, whatever it had before.

        Args:
            path: the file.
            tokenizer: as given to the table that was saved.
            vocab_size: likewise.
            slot_bits: of contexts that now share a slot, the most frequent stays.

        Raises:
            BundleError: the file cannot be read, is damaged, newer than this reader or made for another tokenizer.
            RequestError: an argument is out of range.
        """
        table = cls(tokenizer, vocab_size, slot_bits)
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BundleError(f"the n-gram table {path} cannot be read: {error.strerror or error}") from error
        try:
            table._fill(*_parse(data, tokenizer, vocab_size))
        except ValueError as error:
            raise BundleError(
                f"the n-gram table {path} {error}; delete it or name another file, and a new table will be learned"
            ) from None
        return table

    def _count(self, key: int, token: int) -> None:
        """Count ``token`` for the context ``key``."""
        keys, tokens, counts = self._keys, self._tokens, self._counts
        slot = key >> self._shift
        first = slot * SUCCESSORS
        if keys[slot] != key:
            for place in range(first, first + SUCCESSORS):
                if counts[place]:
                    counts[place] -= 1
            if counts[first]:
                return
            keys[slot] = key
        for place in range(first, first + SUCCESSORS):
            if not counts[place]:
                tokens[place] = token
                break
            if tokens[place] == token:
                break
        else:
            counts[place] -= 1
            if counts[place]:
                return
            tokens[place] = token
        if counts[place] == _MAX_COUNT:
            for other in range(first, first + SUCCESSORS):
                counts[other] >>= 1
        counts[place] += 1
        # Of tokens seen as often, the one seen last comes first.
        while place > first and counts[place - 1] <= counts[place]:
            counts[place - 1], counts[place] = counts[place], counts[place - 1]
            tokens[place - 1], tokens[place] = tokens[place], tokens[place - 1]
            place -= 1

    def _entries(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]:
        """Copies of the keys [contexts], tokens and counts [contexts, SUCCESSORS] that are in use."""
        counts = np.frombuffer(self._counts, np.uint8).reshape(-1, SUCCESSORS)
        used = counts[:, 0] > 0
        keys = np.frombuffer(self._keys, np.uint64)
        tokens = np.frombuffer(self._tokens, np.uint32).reshape(-1, SUCCESSORS)
        return keys[used], tokens[used], counts[used]

    def _fill(self, keys: NDArray[np.uint64], tokens: NDArray[np.uint32], counts: NDArray[np.uint8]) -> None:
        """Take over entries into an empty table."""
        order = np.argsort(counts[:, 0], kind="stable")  # of those that share a slot, the last one written stays
        slots = keys[order] >> np.uint64(self._shift)
        np.frombuffer(self._keys, np.uint64)[slots] = keys[order]
        np.frombuffer(self._tokens, np.uint32).reshape(-1, SUCCESSORS)[slots] = tokens[order]
        np.frombuffer(self._counts, np.uint8).reshape(-1, SUCCESSORS)[slots] = counts[order]


def _keys(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The contexts at the end of ``tokens``, the shortest first: how many tokens each has, and its key (64 bits)."""
    key = 0
    for length, token in enumerate(reversed(tokens), start=1):
        key = (key + token + 1) * _MULTIPLIER & _KEY_MASK
        if length >= SHORTEST:
            yield length, key


def _parse(
    data: bytes, tokenizer: str, vocab_size: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]:
    """The entries in a file.

    Raises:
        ValueError: what is wrong with the file.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"has more than {_MAX_FILE_BYTES} bytes")
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("is not an n-gram table")
    if len(data) < _PREFIX.size + _SIZES.size:
        raise ValueError("is cut short")
    _, version, checksum = _PREFIX.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"has version {version}, expected {_VERSION}")
    if zlib.crc32(data[_PREFIX.size :]) != checksum:
        raise ValueError("is damaged: it does not have the checksum it names")
    saved_vocab_size, contexts, name_bytes = _SIZES.unpack_from(data, _PREFIX.size)
    name_start = _PREFIX.size + _SIZES.size
    start = name_start + name_bytes
    if len(data) != start + contexts * _CONTEXT_BYTES:
        raise ValueError(f"has {len(data)} bytes, expected {start + contexts * _CONTEXT_BYTES}")
    if (data[name_start:start], saved_vocab_size) != (tokenizer.encode(), vocab_size):
        raise ValueError("was made for another tokenizer")
    keys = np.frombuffer(data, "<u8", contexts, start).astype(np.uint64)
    tokens = np.frombuffer(data, "<u4", contexts * SUCCESSORS, start + 8 * contexts).astype(np.uint32)
    counts = np.frombuffer(data, np.uint8, offset=start + (8 + 4 * SUCCESSORS) * contexts).reshape(-1, SUCCESSORS)
    if (tokens >= vocab_size).any():
        raise ValueError(f"holds token ids of {vocab_size} or more, which the tokenizer does not have")
    if not counts[:, 0].all() or (counts[:, :-1] < counts[:, 1:]).any():
        raise ValueError("holds counts that do not descend")
    return keys, tokens.reshape(-1, SUCCESSORS), counts
