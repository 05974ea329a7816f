"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

from edge_spec.errors import RequestError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power  # as in ``docker run --memory 2g``

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def size_text(count: int) -> str:
    """Return a number of bytes in the largest binary unit that keeps it at 1 or above, e.g. ``1.75 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def parse_size(text: str, name: str = "size") -> int:
    """Return the bytes of a size such as ``"2GiB"``, ``"800 MB"``, ``"1.5g"`` (binary) or ``"1000000"``.

    Raises:
        RequestError: it is no size; the message calls it ``name``.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise RequestError(f"{name} is {text!r}, expected a size such as '2GiB', '800MB' or a number of bytes.")
    return int(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
