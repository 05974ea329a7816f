"""A control group with a memory limit of its own, for processes that are to run out of memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_VERSION_1 = Path("/sys/fs/cgroup/memory")
_VERSION_2 = Path("/sys/fs/cgroup")


class ControlGroup:
    """Processes in it share ``limit`` bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        old = folder.parent == _VERSION_1
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        if not old:
            (folder / "memory.swap.max").write_text("0")

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process in the group."""

        def enter() -> None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.Popen(command, text=True, preexec_fn=enter, **options)

    def python(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a script of the tests that is talked to through its standard streams."""
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return self.start([sys.executable, str(script), *arguments], env=environment, **pipes)


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[ControlGroup]:
    """Make a group and remove it again. Skips the test, and says so, where the system does not allow it."""
    parent = _VERSION_1 if _VERSION_1.is_dir() else _VERSION_2
    try:
        folder = Path(tempfile.mkdtemp(prefix="edge-spec-", dir=parent))
    except OSError as error:
        pytest.skip(f"no control group can be made in {parent} ({error.strerror}); this test needs root")
    try:
        try:
            group = ControlGroup(folder, limit)
        except OSError as error:
            pytest.skip(f"no memory limit can be set in {folder} ({error.strerror})")
        yield group
    finally:
        for _ in range(100):  # its last process may not be gone yet
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
