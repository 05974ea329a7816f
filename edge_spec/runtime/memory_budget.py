"""How much memory an engine may take, as the caller says it."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

from edge_spec.byte_size import parse_size
from edge_spec.errors import RequestError

# Of what is free, where the caller says nothing: the rest is for the app around the engine.
DEFAULT_SHARE = 0.8

# A share written as text: ``"50%"``, or ``"0.5"``, which would be no size.
_SHARE = re.compile(r"\s*(\d*\.?\d+)\s*%\s*|\s*(0?\.\d+|1\.0*)\s*")

_EXPECTED = "a size such as '2GiB', a number of bytes, or a share of what is free such as '50%'"

MemoryBudget = int | float | str | None


def budget_bytes(budget: MemoryBudget, available: int | None, name: str = "memory_budget") -> int | None:
    """Return a budget in bytes.

    Args:
        budget: a size such as ``"2GiB"``, a number of bytes, or the share of what is available, above 0 and
            at most 1 (as text also ``"50%"``);
            ``None``: :data:`DEFAULT_SHARE` of it.
        available: bytes that are free; ``None`` if the system does not tell.
        name: what the caller calls it.

    Returns:
        Bytes; ``None`` if nothing was said and the system does not tell what is free.

    Raises:
        RequestError: it is none of these.
    """
    given: Any = budget  # whatever a caller may have passed
    if given is None and available is None:
        return None
    if isinstance(given, str) and (share := _SHARE.fullmatch(given)) is not None:
        size = _share(float(share[1]) / 100 if share[1] else float(share[2]), available, f"{name} is {given!r}")
    elif isinstance(given, str):
        size = parse_size(given, name, _EXPECTED)
    elif isinstance(given, bool) or not isinstance(given, Real | None):
        raise RequestError(f"{name} is {given!r}, expected {_EXPECTED}.")
    elif isinstance(given, Integral) and given != 1:
        size = int(given)
    else:
        size = _share(DEFAULT_SHARE if given is None else float(given), available, f"{name} is {given!r}")
    if size <= 0:
        raise RequestError(f"{name} is {given!r}, expected more than nothing.")
    return size


def is_share(budget: str) -> bool:
    """Whether a budget is written as a share of what is free."""
    return _SHARE.fullmatch(budget) is not None


def _share(share: float, available: int | None, given: str) -> int:
    if not 0 < share <= 1:
        raise RequestError(
            f"{given}, expected a share of what is free above 0 and at most 1 (100%), or bytes as a whole number."
        )
    if available is None:
        raise RequestError(f"{given}, but this system does not tell what is free; give bytes instead.")
    if available <= 0:
        raise RequestError(f"{given}, but nothing is free; free some memory, or give bytes if you know better.")
    return int(share * available)
