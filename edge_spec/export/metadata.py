"""Typed access to the key-value facts of a checkpoint, whose every complaint names the file and the key."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from edge_spec.errors import CheckpointError

# No size in a real model comes near this; what does is a corrupt or hostile file.
_LARGEST_SIZE = 2**31 - 1


class Metadata(Mapping[str, Any]):
    """The facts of one file: a read-only mapping whose getters check types and ranges."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Wrap ``values``; ``where`` names their file in messages."""
        self._values = values
        self.where = where

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number from ``minimum`` up. Raises CheckpointError otherwise, or if required and absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST_SIZE:
            raise self._unexpected(key, value, f"a whole number from {minimum} to {_LARGEST_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero. Raises CheckpointError otherwise, or if required and absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise self._unexpected(key, value, "a finite number above zero")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Raises CheckpointError otherwise, or if required and absent."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._unexpected(key, value, "a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value. Raises CheckpointError otherwise, or if required and absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._unexpected(key, value, "true or false")
        return value

    def numbers(self, keys: Mapping[str, str]) -> dict[str, float]:
        """Return the finite numbers found under ``keys``, a map from the names they get to their keys here."""
        found = {name: self._values.get(key) for name, key in keys.items()}
        return {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        }

    def _value(self, key: str, default: object) -> Any:
        # JSON null means "not set", as an absent key does.
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.where} lacks {key!r}, which is needed; the checkpoint is incomplete")
        return value

    def _unexpected(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CheckpointError(f"{self.where}: {key!r} is {shown}, expected {expected}; the checkpoint is damaged")
