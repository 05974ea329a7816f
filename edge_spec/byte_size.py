"""Numbers of bytes as people write them."""

from __future__ import annotations

import math
import re

from edge_spec.errors import RequestError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power  # as in ``docker run --memory 2g``

# Units of what is shown, and digits behind the point.
_SHOWN = (("B", 0), ("KiB", 0), ("MiB", 1), ("GiB", 2))

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def size_text(count: int, up: bool = False) -> str:
    """Return a number of bytes in the largest binary unit that keeps it at 1 or above, e.g. ``1.75 GiB``.

    Args:
        count: bytes.
        up: round up, so that whoever copies what is shown has enough.
    """
    power = min(max(count.bit_length() - 1, 0) // 10, len(_SHOWN) - 1)
    unit, digits = _SHOWN[power]
    size = count / 1024**power
    if up:
        size = math.ceil(size * 10**digits) / 10**digits
    return f"{size:.{digits}f} {unit}"


_EXPECTED = "a size such as '2GiB', '800MB' or a number of bytes"


def parse_size(text: str, name: str = "size", expected: str = _EXPECTED) -> int:
    """Return the bytes of a size such as ``"2GiB"``, ``"800 MB"``, ``"1.5g"`` (binary) or ``"1000000"``.

    Raises:
        RequestError: it is no size; the message calls it ``name``, and says what was ``expected``.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise RequestError(f"{name} is {text!r}, expected {expected}.")
    return int(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
