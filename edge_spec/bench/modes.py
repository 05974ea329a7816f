"""Ways to decode that are compared, and how they are written: ``auto:max_draft=4@distribution``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from edge_spec.errors import RequestError
from edge_spec.runtime.exactness import Exactness

PLAIN = "off"
BASELINE = "baseline"

# Drafters that not every bundle has, in words.
_NETWORKS = {"head": "head", "model": "draft model"}


@dataclass(frozen=True)
class Mode:
    """One way to decode.

    Attributes:
        name: as the user wrote it.
        speculation: ``"off"``, ``"auto"`` or a drafter's name.
        options: further options of each request.
        exactness: what the engine is loaded with; ``None`` leaves it to the command's own option.
    """

    name: str
    speculation: str = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict)
    exactness: Exactness | None = None


def parse_modes(text: str) -> list[Mode]:
    """Read modes separated by commas; ``off``, which the others are compared with, comes first whether named or not.

    Each is ``SPECULATION[:OPTION=VALUE]...[@EXACTNESS]`` with the options ``max_draft``, ``tree`` and ``verification``.

    Raises:
        RequestError: a mode is malformed or named twice.
    """
    modes = [_mode(part.strip()) for part in text.split(",") if part.strip()]
    names = [mode.name for mode in modes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"the mode {twice!r} is named twice.")
    return [Mode(PLAIN), *(mode for mode in modes if mode.name != PLAIN)]


def require_drafters(modes: Sequence[Mode], drafters: Sequence[str]) -> None:
    """Raise RequestError if a mode asks for a drafter that is not among ``drafters``."""
    known = ("off", "auto", *drafters)
    for mode in modes:
        if mode.speculation not in known:
            hints = {name: f" This bundle has no {words}, or it is not loaded." for name, words in _NETWORKS.items()}
            hint = hints.get(mode.speculation, "")
            raise RequestError(
                f"the mode {mode.name!r} asks for the drafter {mode.speculation!r}, expected one of "
                f"{', '.join(map(repr, known))}.{hint}"
            )


def _mode(text: str) -> Mode:
    body, at, level = text.partition("@")
    if at and level not in get_args(Exactness):
        known = " or ".join(map(repr, get_args(Exactness)))
        raise RequestError(f"the mode {text!r} asks for exactness {level!r}, expected {known} after '@'.")
    speculation, *words = body.split(":")
    if not speculation:
        raise RequestError(f"the mode {text!r} names no drafter, expected for example 'auto:max_draft=4'.")
    if speculation == PLAIN and words:
        raise RequestError(f"the mode {text!r} has options, but plain decoding has none.")
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _OPTIONS:
            raise RequestError(
                f"the mode {text!r} has the option {word!r}, expected one of "
                f"{', '.join(f'{known}=...' for known in _OPTIONS)}."
            )
        try:
            options[name] = _OPTIONS[name](value)
        except ValueError as error:
            raise RequestError(f"the mode {text!r} has the option {word!r}, expected {error}.") from None
    return Mode(text, speculation, options, cast("Exactness", level) if at else None)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a number")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("on or off")
    return text == "on"


def _name(text: str) -> str:
    if not text:
        raise ValueError("a name")
    return text


_OPTIONS: dict[str, Callable[[str], Any]] = {"max_draft": _count, "tree": _switch, "verification": _name}
