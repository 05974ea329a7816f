"""Memory that was freed, but not given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it for later (glibc); elsewhere do nothing.

    Loading leaves much of it behind: half of what a tokenizer of 150,000 ids seems to hold. So does a cache that grows,
    whose old buffers are too small for the new ones. Takes a fraction of a millisecond, more where there is more.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None
    return trim
