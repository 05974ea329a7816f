"""Where files lie that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """The folder for edge-spec in the user's cache (XDG Base Directory Specification); ``None`` for a homeless user."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "edge-spec"


def named_cache() -> Path | None:
    """The folder that ``EDGE_SPEC_CACHE`` names instead; ``None`` if it names none."""
    named = os.environ.get("EDGE_SPEC_CACHE")
    return Path(named) if named else None
