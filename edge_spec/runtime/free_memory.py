"""How much memory there is, and how much of it is free: of the machine, and of every control group around the process.

A container sees the machine's figures, but it is ended at its own limit. Both versions of control groups are read; what
cannot be read is taken for no limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_KIB = 1024

# Discrete GPUs have memory of their own, whose figure the device gives. Where CPU and GPU share it (Jetson), what is
# here holds for both.


@dataclass(frozen=True)
class _Group:
    """The files of one control group.

    Attributes:
        limit: most bytes it may use; ``max`` or a number beyond all memory: no limit.
        usage: bytes it uses now, cached files included.
        stat: details of the usage.
        inactive: the line in there with the cached files that are given back first.
    """

    limit: str
    usage: str
    stat: str
    inactive: bytes


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that can be taken without swapping and without exceeding a limit; ``None`` if nothing tells.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    machine = _read(f"{root}/proc/meminfo")
    found, total = [_field(machine, b"MemAvailable:", _KIB)], _field(machine, b"MemTotal:", _KIB)
    for group in _groups(str(root)):
        limit = _number(_read(group.limit))
        if limit is None or (total is not None and limit >= total):
            continue  # the other files take the kernel a while
        if (usage := _number(_read(group.usage))) is not None:
            found.append(max(0, limit - usage + (_field(_read(group.stat), group.inactive, 1) or 0)))
    return min((size for size in found if size is not None), default=None)


def total_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes there are for this process at most, others left aside; ``None`` if nothing tells."""
    found = [_field(_read(f"{root}/proc/meminfo"), b"MemTotal:", _KIB)]
    found += [_number(_read(group.limit)) for group in _groups(str(root))]
    return min((size for size in found if size is not None), default=None)


@lru_cache(maxsize=8)
def _groups(root: str) -> tuple[_Group, ...]:
    """The groups that the process is in, and those around them, which limit it as well.

    A process is hardly ever moved to another group, so this is looked up once.
    """
    groups: list[_Group] = []
    mounts = _mounts(root)
    for line in _read(f"{root}/proc/self/cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 2 if controllers == "" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mounted, mount in mounts.get(version, ()):
            groups += _upwards(f"{root}{mount}".replace("//", "/"), _inside(path, mounted), version)
    return tuple(groups)


def _mounts(root: str) -> dict[int, list[tuple[str, str]]]:
    """For each version of control groups, what is mounted where: the group at the mount's root, and the folder."""
    mounts: dict[int, list[tuple[str, str]]] = {}
    for line in _read(f"{root}/proc/self/mountinfo").decode("utf-8", "replace").splitlines():
        left, _, right = line.partition(" - ")
        fields, system = left.split(), right.split()
        if len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2":
            mounts.setdefault(2, []).append((fields[3], fields[4]))
        elif system[0] == "cgroup" and "memory" in system[2].split(","):
            mounts.setdefault(1, []).append((fields[3], fields[4]))
    return mounts


def _inside(path: str, mounted: str) -> str:
    """Where a group lies below a mount. A container may see itself at the root of what it is given."""
    if mounted == "/" or ".." in PurePosixPath(path).parts:
        return path
    return path[len(mounted) :] if path == mounted or path.startswith(f"{mounted}/") else "/"


def _upwards(mount: str, path: str, version: int) -> list[_Group]:
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    groups = []
    for depth in range(len(parts), -1, -1):
        folder = "/".join([mount.rstrip("/"), *parts[:depth]])
        if version == 2:
            limit, usage, inactive = "max", "current", b"inactive_file"
        else:
            limit, usage, inactive = "limit_in_bytes", "usage_in_bytes", b"total_inactive_file"
        group = _Group(f"{folder}/memory.{limit}", f"{folder}/memory.{usage}", f"{folder}/memory.stat", inactive)
        if os.path.exists(group.limit):  # noqa: PTH110  # a path as text
            groups.append(group)
    return groups


def _read(file: str) -> bytes:
    """The content of a small file of the kernel's; nothing if there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _number(content: bytes) -> int | None:
    """The number in a file; ``None`` where it says ``max``, or nothing."""
    try:
        return int(content)
    except ValueError:
        return None


def _field(content: bytes, name: bytes, unit: int) -> int | None:
    """The number behind a name at the start of a line, in bytes."""
    start = 0 if content.startswith(name) else content.find(b"\n" + name) + 1
    if start == 0 and not content.startswith(name):
        return None
    words = content[start : start + 80].split(None, 2)
    return int(words[1]) * unit if len(words) > 1 and words[0] == name and words[1].isdigit() else None
