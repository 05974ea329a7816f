"""The metadata keys of a GGUF file that belong to its architecture, and which of them nobody has asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec.errors import UnsupportedError
from edge_spec.export.metadata import Metadata

# Keys that say nothing of the computation, or what the tensors say as well; and those of parts for other media.
_SILENT = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
)
_SILENT_PREFIXES = ("vision.", "audio.", "mm.")


class GgufFacts:
    """The keys of a file's architecture, by their names without it; remembers which of them were asked for."""

    def __init__(self, metadata: Metadata) -> None:
        """Take the keys that begin with the file's ``general.architecture``."""
        self.where = metadata.where
        self._metadata = metadata
        self._prefix = metadata.text("general.architecture") + "."
        self._unread = {key.removeprefix(self._prefix) for key in metadata if key.startswith(self._prefix)}

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number, as :meth:`Metadata.integer` does."""
        return self._read(key).integer(self._prefix + key, default, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero, as :meth:`Metadata.number` does."""
        return self._read(key).number(self._prefix + key, default)

    def optional_number(self, key: str) -> float | None:
        """Return a finite number above zero, or ``None`` if it is absent or 0, which stands for that."""
        self._read(key)
        value = self._metadata.get(self._prefix + key)
        return None if value is None or (value == 0 and not isinstance(value, bool)) else self.number(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, as :meth:`Metadata.text` does."""
        return self._read(key).text(self._prefix + key, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value, as :meth:`Metadata.flag` does."""
        return self._read(key).flag(self._prefix + key, default)

    def list(self, key: str) -> Sequence[Any] | None:
        """Return a list, or ``None`` if the key is absent or holds none."""
        value = self._metadata.get(self._prefix + key)
        if isinstance(value, list):
            self._unread.discard(key)
            return value
        return None

    def refuse_unread(self) -> None:
        """Raise UnsupportedError if a key was not asked for that might change what the model computes."""
        for key in sorted(self._unread.difference(_SILENT)):
            value = self._metadata[self._prefix + key]
            # What is zero, false or empty is switched off.
            if value and not key.startswith(_SILENT_PREFIXES):
                shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
                raise UnsupportedError(
                    f"{self.where}: {self._prefix}{key} is {shown}, which is not supported; a model exported without "
                    "it would compute something else"
                )

    def _read(self, key: str) -> Metadata:
        """Note that a key was asked for, and return the metadata, where a list that repeats a value is that value."""
        self._unread.discard(key)
        value = self._metadata.get(self._prefix + key)
        if not isinstance(value, list):
            return self._metadata
        if not value or any(item != value[0] for item in value):
            raise UnsupportedError(f"{self.where}: {self._prefix + key} differs between layers, which is not supported")
        return Metadata({self._prefix + key: value[0]}, self.where)
