"""Free memory as seen from inside control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.runtime.free_memory import available_memory, total_memory

GIB = 1 << 30
UNLIMITED = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 8 GiB, 6 of them free, without control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    write(tmp_path, "proc/meminfo", f"MemTotal: {8 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB >> 10} kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def version_1(root: Path, group: str, limit: int, usage: int, inactive: int) -> None:
    folder = f"sys/fs/cgroup/memory{group}"
    write(root, f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{usage}\n")
    write(root, f"{folder}/memory.stat", f"inactive_file 7\ntotal_cache 1\ntotal_inactive_file {inactive}\n")


def version_2(root: Path, group: str, limit: str, usage: int, inactive: int) -> None:
    folder = f"sys/fs/cgroup{group}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{usage}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\n")


def in_version_1(root: Path, group: str, mounted: str = "/") -> None:
    write(root, "proc/self/cgroup", f"9:name=systemd:/\n4:cpu,memory:{group}\n0::/\n")
    write(
        root,
        "proc/self/mountinfo",
        f"31 30 0:27 {mounted} /sys/fs/cgroup/memory rw,nosuid shared:13 - cgroup cgroup rw,cpu,memory\n"
        "32 30 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n",
    )


def in_version_2(root: Path, group: str) -> None:
    write(root, "proc/self/cgroup", f"0::{group}\n")
    write(root, "proc/self/mountinfo", "31 30 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")


def test_without_groups_the_machine_decides(root: Path) -> None:
    assert available_memory(root) == 6 * GIB
    assert total_memory(root) == 8 * GIB


def test_a_system_that_tells_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert total_memory(tmp_path) is None


def test_cached_files_of_a_version_1_group_count_as_free(root: Path) -> None:
    in_version_1(root, "/app")
    version_1(root, "", UNLIMITED, 7 * GIB, 0)
    version_1(root, "/app", 2 * GIB, GIB + 100, 40)
    assert available_memory(root) == GIB - 60
    assert total_memory(root) == 2 * GIB


def test_cached_files_of_a_version_2_group_count_as_free(root: Path) -> None:
    in_version_2(root, "/app")
    version_2(root, "/app", str(2 * GIB), GIB + 100, 40)
    assert available_memory(root) == GIB - 60
    assert total_memory(root) == 2 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_around_the_process_counts(root: Path, version: int) -> None:
    sizes = {"/outer/inner": (4 * GIB, GIB), "/outer": (3 * GIB, 2 * GIB)}
    (in_version_1 if version == 1 else in_version_2)(root, "/outer/inner")
    for group, (limit, usage) in sizes.items():
        if version == 1:
            version_1(root, group, limit, usage, 0)
        else:
            version_2(root, group, str(limit), usage, 0)
    assert available_memory(root) == GIB
    assert total_memory(root) == 3 * GIB


def test_no_limit_is_none(root: Path) -> None:
    in_version_2(root, "/app")
    version_2(root, "/app", "max", 7 * GIB, 0)
    assert available_memory(root) == 6 * GIB
    assert total_memory(root) == 8 * GIB


def test_a_group_beyond_its_limit_leaves_nothing(root: Path) -> None:
    in_version_2(root, "/app")
    version_2(root, "/app", str(GIB), 2 * GIB, 5)
    assert available_memory(root) == 0


def test_a_container_that_is_mounted_its_own_group_finds_its_limit(root: Path) -> None:
    in_version_1(root, "/docker/1234/job", mounted="/docker/1234")
    version_1(root, "/job", GIB, 100, 0)
    version_1(root, "", 3 * GIB, 100, 0)
    assert available_memory(root) == GIB - 100


def test_a_container_sees_the_limit_at_its_mount_whatever_its_path_is_called(root: Path) -> None:
    in_version_1(root, "/docker/1234")  # a path of the host, which is not mounted here
    version_1(root, "", GIB, 100, 0)
    assert available_memory(root) == GIB - 100


def test_this_machine_has_memory() -> None:
    available, total = available_memory(), total_memory()
    if available is None or total is None:
        pytest.skip("this system does not tell")
    assert 0 < available <= total
