"""How the command line reads numbers of things: ids in portions of 1,024, tokens in thousands and millions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

_MOST_DIGITS = 15


def id_count(text: str) -> int:
    """Read a number of ids, times 1,024 where it ends with a k. Raises ArgumentTypeError."""
    return _count(text, {"k": 1024}, "no number of ids, expected one such as 32k or 32768")


def token_count(text: str) -> int:
    """Read a number of tokens, in thousands (k) or millions (m). Raises ArgumentTypeError."""
    return _count(text, {"k": 1000, "m": 1_000_000}, "no number, expected one such as 300k or 300000")


def _count(text: str, units: Mapping[str, int], complaint: str) -> int:
    unit = units.get(text[-1:].lower())
    digits = text if unit is None else text[:-1]
    if digits.isascii() and digits.isdecimal() and len(digits) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"{text[:20]}... is more than can be counted here, expected {_MOST_DIGITS} digits at most"
        )
    if not (digits.isascii() and digits.isdecimal()) or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is {complaint}")
    return int(digits) * (unit or 1)
