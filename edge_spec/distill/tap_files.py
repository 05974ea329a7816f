"""Tapped texts in a folder of numbered files, each of which is there whole or not at all.

``taps.json`` says what the texts come from. A file ``texts-00000.bin`` begins with a line of JSON, padded with spaces
to a multiple of 64 bytes, that has the lengths of its texts and of their prompts; then come the arrays of each text in
turn, token_ids int32, top_ids int32, top_log_probs float16 and taps float16, little-endian, each padded with zeros to
a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_spec.distill.tapped_text import TappedText
from edge_spec.errors import RequestError

HEADER = "taps.json"

_FORMAT = "edge-spec tapped texts 1"
_NAME = re.compile(r"texts-(\d{5})\.bin")
_ALIGNMENT = 64
# Of a damaged file no more is read, and no more believed.
_LONGEST_LINE = 1 << 20
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class TapHeader:
    """What the texts of a folder come from.

    Attributes:
        target_digest: of what decides what the target writes: its weights, tokenizer and chat template.
        taps: layers after which the residual stream was taken; there may be none.
        hidden_size: elements of each tap.
        top_tokens: likeliest tokens kept of each row.
        seed: of prompts and sampling.
        prompts: a name or a digest of what was asked.
        max_new_tokens: longest answer.
    """

    target_digest: str
    taps: tuple[int, ...]
    hidden_size: int
    top_tokens: int
    seed: int
    prompts: str
    max_new_tokens: int


@dataclass(frozen=True)
class _Place:
    """Where a text lies: its file, the offset there in bytes, and its sizes in tokens."""

    file: int
    offset: int
    tokens: int
    prompt_length: int


class TapFiles:
    """Reads a folder of tapped texts, and appends to it.

    Attributes:
        folder: where they are.
        header: what they come from.
        answer_tokens: tokens of all answers.
        total_tokens: tokens of all texts.
        stored_bytes: size of all files of texts.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a folder that :meth:`begin` has created.

        Raises:
            RequestError: there is none, or its files are damaged.
        """
        self.folder = Path(folder)
        self.header = _read_header(self.folder / HEADER)
        self.answer_tokens = self.total_tokens = self.stored_bytes = 0
        self._places: list[_Place] = []
        self._files: list[Path] = []
        self._mapped: dict[int, npt.NDArray[np.uint8]] = {}
        names = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        for number, path in enumerate(names):
            if path.name != _name(number):
                raise RequestError(f"{self.folder} has {path.name} but no {_name(number)}; write the texts anew.")
            self._add(path)

    @classmethod
    def begin(cls, folder: str | os.PathLike[str], header: TapHeader) -> TapFiles:
        """Open a folder to go on writing to it, or create it.

        Raises:
            RequestError: the folder has texts from something else, or cannot be written.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / HEADER).exists():
                _write_whole(path / HEADER, [json.dumps({"format": _FORMAT, **asdict(header)}, indent=1).encode()])
            for leftover in path.glob(".*.partial"):
                leftover.unlink()
        except OSError as error:
            raise RequestError(
                f"{path} cannot be written ({error.strerror or error}); name a folder that can."
            ) from None
        files = cls(path)
        if files.header != header:
            theirs, ours = asdict(files.header), asdict(header)
            name = next(name for name in ours if ours[name] != theirs[name])
            raise RequestError(
                f"{path} holds texts with {name} {theirs[name]!r}, not {ours[name]!r}; name another folder, or ask for "
                "what it was begun with."
            )
        return files

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._places)

    def lengths(self, index: int) -> tuple[int, int]:
        """Tokens of a text and of its prompt, without reading it."""
        return self._places[index].tokens, self._places[index].prompt_length

    def read(self, index: int) -> TappedText:
        """Return text ``index``; its arrays are mapped from the file and cannot be written to."""
        place = self._places[index]
        if place.file not in self._mapped:
            self._mapped[place.file] = np.memmap(self._files[place.file], np.uint8, "r")
        content = self._mapped[place.file]
        arrays, offset = [], place.offset
        for dtype, columns in self._layout():
            size = place.tokens * columns * dtype.itemsize
            array = content[offset : offset + size].view(dtype)
            arrays.append(array if columns == 1 else array.reshape(place.tokens, columns))
            offset += _padded(size)
        token_ids, top_ids, top_log_probs, taps = arrays
        return TappedText(token_ids, place.prompt_length, taps, top_ids, top_log_probs)

    def append(self, texts: Sequence[TappedText], limit_bytes: int | None = None) -> bool:
        """Write one more file with these texts.

        Args:
            texts: at least one.
            limit_bytes: most that all files together may take.

        Returns:
            Whether there was room for it; if not, nothing is written.

        Raises:
            RequestError: the file cannot be written.
        """
        lengths = [len(text.token_ids) for text in texts]
        head = json.dumps({"tokens": lengths, "prompts": [text.prompt_length for text in texts]}).encode()
        head += b" " * (-(len(head) + 1) % _ALIGNMENT) + b"\n"
        size = len(head) + sum(map(self._text_bytes, lengths))
        if limit_bytes is not None and self.stored_bytes + size > limit_bytes:
            return False
        path = self.folder / _name(len(self._files))
        try:
            _write_whole(path, [head, *_blocks(texts)])
        except OSError as error:
            raise RequestError(f"{path} cannot be written ({error.strerror or error}); free some space.") from None
        self._add(path)
        return True

    def _layout(self) -> tuple[tuple[np.dtype[Any], int], ...]:
        """Type and columns of a text's arrays."""
        header = self.header
        integers, halves = np.dtype("<i4"), np.dtype("<f2")
        return (
            (integers, 1),
            (integers, header.top_tokens),
            (halves, header.top_tokens),
            (halves, len(header.taps) * header.hidden_size),
        )

    def _text_bytes(self, tokens: int) -> int:
        return sum(_padded(tokens * columns * dtype.itemsize) for dtype, columns in self._layout())

    def _add(self, path: Path) -> None:
        """Take a file into the account of what there is."""
        number = len(self._files)
        try:
            with path.open("rb") as file:
                line = file.readline(_LONGEST_LINE)
                entries = json.loads(line)
                offset = len(line)
                for tokens, prompt in zip(entries["tokens"], entries["prompts"], strict=True):
                    if type(tokens) is not int or type(prompt) is not int or not 0 < prompt <= tokens <= _MOST_TOKENS:
                        raise ValueError(f"a text has {str(tokens)[:20]} tokens, {str(prompt)[:20]} of its prompt")
                    self._places.append(_Place(number, offset, tokens, prompt))
                    offset += self._text_bytes(tokens)
                    self.total_tokens += tokens
                    self.answer_tokens += tokens - prompt
                size = os.fstat(file.fileno()).st_size
            if size != offset:
                raise ValueError(f"it has {size:,} bytes, expected {offset:,}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(f"{path} is damaged ({error}); remove it and all later ones, and go on.") from None
        self._files.append(path)
        self.stored_bytes += size


def _read_header(path: Path) -> TapHeader:
    try:
        entries = json.loads(path.read_text("utf-8"))
        if entries.pop("format") != _FORMAT:
            raise ValueError("another format")
        header = TapHeader(**{**entries, "taps": tuple(entries["taps"])})
        if any(type(size) is not int or size < 1 for size in (*header.taps, header.hidden_size, header.top_tokens)):
            raise ValueError("taps and sizes are to be numbers from 1 on")
        return header
    except FileNotFoundError:
        raise RequestError(f"{path.parent} holds no tapped texts; expected a folder with {HEADER}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read ({error}); write the texts anew.") from None


def _write_whole(path: Path, blocks: Sequence[bytes] | Iterator[bytes]) -> None:
    """Write a file so that it appears whole, and is on the disk before it has its name."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # a full disk has better use for the space
            partial.unlink()
        raise


def _blocks(texts: Sequence[TappedText]) -> Iterator[bytes]:
    for text in texts:
        for array in text.arrays():
            data = array.tobytes()
            yield data
            yield bytes(_padded(len(data)) - len(data))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _name(number: int) -> str:
    return f"texts-{number:05d}.bin"
