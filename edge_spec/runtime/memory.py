"""How much memory the machine has, so that what cannot fit is refused before it is allocated."""

from __future__ import annotations

import os

from edge_spec.errors import RequestError


def physical_memory() -> int | None:
    """Return the machine's memory in bytes, or ``None`` where the system does not say."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return size if size > 0 else None


def require_memory(wanted: int, what: str, advice: str) -> None:
    """Raise RequestError if ``wanted`` bytes for ``what`` are more than the whole machine has."""
    available = physical_memory()
    if available is not None and wanted > available:
        raise RequestError(
            f"{what} would take {wanted / 2**30:,.1f} GiB, but this machine has {available / 2**30:,.1f} GiB; {advice}."
        )
