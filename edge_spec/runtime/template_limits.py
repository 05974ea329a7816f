"""What rendering a chat template may cost: seconds of the processor, and characters of memory.

Time is measured by a trace function, which Python calls for every line of every Python function that the template runs:
that works in any thread, and nothing in a template can catch what it raises. It cannot interrupt a single operation
written in C, so those are bounded by the size of what goes in and comes out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

# Seconds of the thread's own processor time, so that a busy machine does not fail an honest template. Real ones take
# milliseconds.
RENDER_SECONDS = 2.0
COMPILE_SECONDS = 4.0

# Characters. The largest real templates have some ten thousand.
LARGEST_SOURCE = 1 << 17
# Characters of one text, and items of one list: far beyond any context.
LARGEST_VALUE = 1 << 22
# What all operations of one rendering make, in characters and items.
LARGEST_TOTAL = 1 << 25
LARGEST_NUMBER = 10_000
DEEPEST_VALUE = 64

_NUMBER_BITS = 10_000
_PIECE = 8  # characters that an item of a list is counted as
_local = threading.local()


class LimitReachedError(BaseException):
    """A template takes too much. No Exception, so that nothing on the way takes it for one of its own."""


class Meter:
    """Counts what one rendering makes."""

    def __init__(self) -> None:
        self._total = 0

    def made(self, value: Any, of: Any = None) -> Any:
        """Count a value that an operation has made, and return it; what is in a list is new if it was a text before."""
        if isinstance(value, str | bytes):
            self._count(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            size = measure(value)
            self._add(_PIECE * (size if isinstance(of, str | bytes) else len(value)))
        return value

    def about_to_make(self, size: int) -> None:
        """Count what an operation is going to make, before it does."""
        self._count(size)

    def _count(self, size: int) -> None:
        if size > LARGEST_VALUE:
            raise LimitReachedError(f"it makes a text or list of more than {LARGEST_VALUE:,} characters or items")
        self._add(size)

    def _add(self, size: int) -> None:
        self._total += size
        if self._total > LARGEST_TOTAL:
            raise LimitReachedError(f"it makes texts of more than {LARGEST_TOTAL:,} characters in all")


def meter() -> Meter:
    """The meter of the rendering that this thread is at."""
    found: Meter = _local.meter
    return found


def measure(value: Any) -> int:
    """Characters and items of a value with everything in it, each as often as it is there."""
    size, depth = 0, 0
    level: list[Any] = [value]
    while level:
        if depth > DEEPEST_VALUE:
            raise LimitReachedError(f"it nests lists more than {DEEPEST_VALUE} deep")
        inner: list[Any] = []
        for item in level:
            size += len(item) if isinstance(item, str | bytes) else 1
            if isinstance(item, Mapping):
                inner.extend(item.keys())
                inner.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                inner.extend(item)
            if size + len(inner) > LARGEST_VALUE:
                raise LimitReachedError(f"it makes a text or list of more than {LARGEST_VALUE:,} characters or items")
        level, depth = inner, depth + 1
    return size


def require_small(numbers: Iterable[Any], largest: int = LARGEST_NUMBER) -> None:
    """Refuse numbers that say how often or how wide, if a template cannot need them."""
    for number in numbers:
        if isinstance(number, int) and abs(number) > largest:
            raise LimitReachedError(f"it uses a number beyond {largest:,} as a width or count")


def multiplied(left: Any, right: Any) -> Any:
    """``left * right``, if the product is of a sane size."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            meter().about_to_make(measure(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() + right.bit_length())
    return meter().made(left * right)


def power(left: Any, right: Any) -> Any:
    """``left ** right``, if the result is of a sane size."""
    if isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * abs(right))
    return left**right


def added(left: Any, right: Any) -> Any:
    """``left + right``, if the sum is of a sane size."""
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        meter().about_to_make(len(left) + len(right))
    return meter().made(left + right)


def formatted(left: Any, right: Any) -> Any:
    """``left % right``: a remainder, or a text with values in it."""
    if isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        if "*" in text:
            require_small(right if isinstance(right, tuple) else (right,))
        require_small(_numbers(text))
        meter().about_to_make(len(text) + text.count("%") * (measure(right) + LARGEST_NUMBER // 100))
    return meter().made(left % right)


def require_format(text: str, values: Iterable[Any]) -> None:
    """Refuse ``text.format(...)`` with widths beyond reason, or with ones that are values themselves."""
    require_small(_numbers(text))
    inside = False
    for character in text.replace("{{", "").replace("}}", ""):
        if character == "{" and inside:
            raise LimitReachedError("it formats with a width that is a value itself")
        inside = character == "{" if character in "{}" else inside
    meter().about_to_make(len(text) + text.count("{") * sum(measure(value) for value in values))


def limited(seconds: float, function: Callable[[], Result]) -> Result:
    """Call a function under a time limit and with a meter of its own.

    Args:
        seconds: processor time of this thread.
        function: the work.

    Raises:
        LimitReachedError: it takes longer, or makes more than a meter allows.
    """
    deadline = time.thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise LimitReachedError(f"it takes more than {seconds:g} seconds")
        # What is here is bounded by itself, and would take ten times as long.
        return None if frame.f_code.co_filename == __file__ else trace

    before, outer = sys.gettrace(), getattr(_local, "meter", None)
    _local.meter = Meter()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)
        _local.meter = outer


def _require_bits(bits: int) -> None:
    if bits > _NUMBER_BITS:
        raise LimitReachedError(f"it computes with a number of more than {_NUMBER_BITS:,} bits")


def _numbers(text: str) -> list[int]:
    """The numbers written out in a text."""
    found, digits = [], ""
    for character in f"{text}.":
        if character.isdecimal():
            digits += character
        elif digits:
            with suppress(ValueError):
                found.append(int(digits[:20]))
            digits = ""
    return found
