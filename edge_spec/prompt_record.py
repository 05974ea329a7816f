"""A file of prompts that were asked, so that a benchmark can ask them again.

One JSON object a line: the time, the prompt and the options that decide the text. ``edge-spec bench --replay`` reads
it; docs/benchmarks.md describes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import operator
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_spec.errors import RequestError

_LOG = logging.getLogger(__name__)

# What is asked of the text. Who drafts and when an answer is cut off belong to the moment, not to the prompt.
REPLAYED_OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "banned_token_ids",
    "stop",
    "stop_token_ids",
    "grammar",
)

DEFAULT_LIMIT_BYTES = 64 << 20


class PromptRecorder:
    """Appends prompts to a file that only its owner can read, up to a size.

    What people wrote is in it, so nothing is recorded unless an app asks for it. Nothing else is recorded: no answer,
    no header, no key.

    A full file stays as it is, and what comes after is not recorded: what a benchmark reads should not change under
    it, and a device's flash should not be written over and over. Whoever wants newer prompts moves the file away; the
    next prompt begins another one. A failing disk costs prompts, never an answer. Either is logged once.

    Threads may share a recorder, and processes a file.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Open the file, or create it.

        Args:
            path: the file, appended to if it is there.
            limit_bytes: the file's largest size.

        Raises:
            RequestError: the file cannot be written, belongs to somebody else, or is no file; or there is no room for
                anything.
        """
        given: object = limit_bytes
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise RequestError(f"limit_bytes is {limit_bytes!r}, expected a number of bytes of at least 1.")
        if not os.fspath(path):
            raise RequestError("The path to record prompts to is empty; name a file.")
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._warned = False
        try:
            os.close(self._open())
        except (OSError, ValueError) as error:  # the latter for a path that no file can have
            reason = getattr(error, "strerror", None) or str(error)
            if self.path.is_symlink():
                reason = "it is a symbolic link, which is not followed"
            raise RequestError(
                f"Prompts cannot be recorded to {str(self.path)!r} ({reason}); name a file of your own that can be "
                "written."
            ) from None

    def record(self, prompt_or_messages: str | Sequence[Any], options: Mapping[str, Any]) -> None:
        """Append a request. What fails here is logged, never raised.

        Args:
            prompt_or_messages: text, token ids, or chat messages, as for :meth:`edge_spec.Engine.stream`.
            options: its options; those that decide the text are recorded, and the others ignored.
        """
        try:
            line = _line(prompt_or_messages, options)
        except (TypeError, ValueError, RecursionError) as error:
            self._warn(f"a prompt is not recorded, since it cannot be written as JSON ({error})")
            return
        try:
            with self._lock:
                written = self._append(line)
        except OSError as error:
            self._warn(f"prompts are not recorded: {self.path} cannot be written ({error.strerror or error})")
        else:
            if not written:
                self._warn(
                    f"no more prompts are recorded: {self.path} has reached its limit of {self.limit_bytes} bytes. "
                    "Move it away to begin another one"
                )

    def _append(self, line: bytes) -> bool:
        """Append a line as a whole or not at all; return whether there was room below the limit."""
        descriptor = self._open()  # each time, so that a file that was moved away is followed by another one
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # what a crash left of a line must not spoil this one
            if size + len(line) > self.limit_bytes:
                return False
            try:
                rest = line
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
            return True
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        # Neither followed to where a link points, nor waited for if it is a pipe.
        descriptor = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self.path} is no regular file")
            if status.st_uid != os.geteuid():
                raise OSError(f"{self.path} belongs to somebody else")
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("%s", message)


def _line(prompt_or_messages: str | Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """A request as a line of the file. Raises TypeError or ValueError if there is no JSON for it."""
    given = {name: options[name] for name in REPLAYED_OPTIONS if options.get(name) is not None}
    entry = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        **_prompt(prompt_or_messages),
        "options": given,
    }
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False, default=_plain)
    # Half a surrogate pair has no UTF-8; escaped, it is what JSON would write for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _prompt(prompt_or_messages: str | Sequence[Any]) -> dict[str, Any]:
    if isinstance(prompt_or_messages, str):
        return {"prompt": prompt_or_messages}
    entries: list[Any] = list(prompt_or_messages)
    if isinstance(prompt_or_messages, Mapping):
        raise TypeError("the prompt is a mapping")
    if entries and isinstance(entries[0], Mapping):
        return {"messages": entries}
    return {"token_ids": [operator.index(token) for token in entries]}


def _plain(value: Any) -> Any:
    """What JSON knows of a value that it does not know: other mappings and sequences, and numpy's numbers."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "kind") and hasattr(value, "text"):  # an edge_spec.Grammar, which is costly to import
        return {value.kind: value.text}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"there is none for a {type(value).__name__}")
