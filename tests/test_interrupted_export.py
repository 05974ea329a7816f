"""Whatever ends an export, at its output lies a whole bundle or none; replacing one leaves the old or the new."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from edge_spec import atomic_folder
from edge_spec.bundle import new_bundle, open_bundle, read_manifest
from edge_spec.errors import BundleError
from gguf_files import METADATA, write_model

# Puts copies of a bundle into a place, one after the other: exports that take a millisecond.
REPLACE = """
    import itertools, shutil, sys
    from dataclasses import replace
    from pathlib import Path
    from edge_spec import atomic_folder
    from edge_spec.bundle import new_bundle, read_manifest
    source, output, exchange = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "exchange"
    if not exchange:
        atomic_folder.exchange = lambda first, second: False
    manifest = read_manifest(source)
    print("ready", flush=True)
    for index in itertools.count():
        with new_bundle(output, overwrite=True) as (folder, seal):
            shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
            seal(replace(manifest, created_by=f"export {index}"))
"""
# Exports on demand, each in a process of its own, without loading all the libraries anew.
EXPORT = """
    import os, sys
    import edge_spec.export.gguf_checkpoint, onnxruntime
    from edge_spec.errors import BundleError
    from edge_spec.export import export_pair
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(int(arguments[0]), 0)[1]), flush=True)
            continue
        process = os.fork()
        if process == 0:
            try:
                source, output, way = arguments
                export_pair(source, None, output, recipe="fp32", check=False, overwrite=way == "overwrite")
                os._exit(0)
            except BundleError:
                os._exit(7)
            finally:
                os._exit(8)
        print(process, flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a script in a process of its own, up to where it is ready."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def ask(process: subprocess.Popen[str], *words: object) -> int:
    """Give a process of EXPORT a command, and return its answer."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(" ".join(map(str, words)) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.fixture(scope="module")
def exporter() -> Iterator[subprocess.Popen[str]]:
    """A process of EXPORT."""
    process = start(EXPORT)
    yield process
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoint") / "tiny.gguf", metadata=METADATA)


@pytest.fixture
def output(plain_pair: Path, tmp_path: Path) -> Path:
    """A bundle to be replaced, in a folder of its own."""
    return Path(shutil.copytree(plain_pair, tmp_path / "place" / "bundle"))


def replace_once(source: Path, output: Path) -> None:
    with new_bundle(output, overwrite=True) as (folder, seal):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        seal(read_manifest(source))


@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_killed_at_any_moment_a_replacement_leaves_the_old_or_the_new(plain_pair: Path, output: Path, way: str) -> None:
    random = Random(way)
    for _ in range(10):
        process = start(REPLACE, plain_pair, output, way)
        time.sleep(random.uniform(0, 0.15))
        kill(process)
        assert open_bundle(output).manifest.target == read_manifest(plain_pair).target
    replace_once(plain_pair, output)
    assert names(output.parent) == ["bundle"]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_killed_between_two_renames_the_old_bundle_comes_back(plain_pair: Path, output: Path, moment: str) -> None:
    script = """
        import os, signal
        from pathlib import Path
        rename, moment = Path.rename, {moment!r}
        def die(self, target):
            last = ".partial-" in str(self)
            if (moment, last) in (("before", False), ("between", True)):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(self, target)
            if (moment, last) == ("after", True):
                os.kill(os.getpid(), signal.SIGKILL)
        Path.rename = die
    """.replace("{moment!r}", repr(moment))
    process = start(textwrap.dedent(script) + textwrap.dedent(REPLACE), plain_pair, output, "two renames")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert output.exists() == (moment != "between")
    made_by = read_manifest(output).created_by
    assert made_by == ("export 0" if moment == "after" else read_manifest(plain_pair).created_by)
    assert open_bundle(output)
    replace_once(plain_pair, output)
    assert names(output.parent) == ["bundle"]


def test_the_next_export_puts_back_what_was_retired_even_if_it_fails_itself(plain_pair: Path, output: Path) -> None:
    retired = output.parent / ".bundle.old-abcd1234"
    retired.mkdir()
    output.rename(retired / "bundle")
    with pytest.raises(BundleError, match="already exists"), new_bundle(output):
        pass
    assert open_bundle(output) and names(output.parent) == ["bundle"]


@pytest.mark.parametrize("way", ["new", "overwrite"])
def test_killed_at_any_moment_an_export_leaves_a_whole_bundle_or_what_was_there(
    checkpoint: Path, exporter: subprocess.Popen[str], tmp_path: Path, way: str
) -> None:
    random, output = Random(way), tmp_path / "place" / "bundle"
    started = time.monotonic()
    assert ask(exporter, "wait", ask(exporter, "export", checkpoint, output, way)) == 0
    duration = time.monotonic() - started
    statuses = []
    for _ in range(10):
        if way == "new":
            shutil.rmtree(output, ignore_errors=True)
        process = ask(exporter, "export", checkpoint, output, way)
        time.sleep(random.uniform(0, duration))
        os.kill(process, signal.SIGKILL)
        statuses.append(ask(exporter, "wait", process))
        if output.exists() or way == "overwrite":
            assert open_bundle(output)
    assert -signal.SIGKILL in statuses and set(statuses) <= {0, -signal.SIGKILL}
    assert ask(exporter, "wait", ask(exporter, "export", checkpoint, output, "overwrite")) == 0
    assert open_bundle(output) and names(output.parent) == ["bundle"]


@pytest.mark.parametrize("way", ["new", "overwrite"])
def test_of_two_processes_at_once_each_leaves_a_whole_bundle(
    checkpoint: Path, exporter: subprocess.Popen[str], tmp_path: Path, way: str
) -> None:
    output = tmp_path / "place" / "bundle"
    processes = [ask(exporter, "export", checkpoint, output, way) for _ in range(2)]
    statuses = sorted(ask(exporter, "wait", process) for process in processes)
    # Where nothing is to be overwritten, the first to be complete stays, and the other says so.
    assert statuses in ([[0, 7]] if way == "new" else [[0, 0], [0, 7]])
    assert open_bundle(output) and names(output.parent) == ["bundle"]


def test_the_work_of_a_living_export_is_left_alone(plain_pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with new_bundle(output) as (folder, seal):
        shutil.copytree(plain_pair, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        script = "from edge_spec.bundle import new_bundle\nwith new_bundle(__import__('sys').argv[1]): pass"
        subprocess.run([sys.executable, "-c", script, output], check=True)
        seal(read_manifest(plain_pair))
    assert open_bundle(output) and names(tmp_path) == ["bundle"]


def test_only_what_an_export_has_left_is_tidied_up(plain_pair: Path, output: Path) -> None:
    place = output.parent
    for name in ("bundle.partial-abcd1234", "bundle.partial-mine", "other.partial-abcd1234", "bundle.partial-photos99"):
        inside = "cat.jpg" if "photos" in name else "target"
        (place / f".{name}" / inside).mkdir(parents=True)
    (place / ".bundle.partial-link5678").symlink_to(place / ".other.partial-abcd1234")
    replace_once(plain_pair, output)
    kept = ["bundle.partial-link5678", "bundle.partial-mine", "bundle.partial-photos99", "other.partial-abcd1234"]
    assert names(place) == [*(f".{name}" for name in kept), "bundle"]


def test_a_link_to_a_bundle_is_replaced_and_the_bundle_behind_it_kept(plain_pair: Path, output: Path) -> None:
    link = output.parent / "link"
    link.symlink_to(output)
    replace_once(plain_pair, link)
    assert not link.is_symlink() and open_bundle(link) and open_bundle(output)
    assert names(output.parent) == ["bundle", "link"]


def test_what_comes_up_at_the_last_moment_is_not_replaced(
    plain_pair: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = atomic_folder.exchange

    def late(first: Path, second: Path) -> bool:
        if not (second / "mine").exists() and not (first / "mine").exists():
            (second / "mine").write_text("mine")
        return exchange(first, second)

    monkeypatch.setattr(atomic_folder, "exchange", late)
    with pytest.raises(BundleError, match="holds 'mine'"):
        replace_once(plain_pair, output)
    assert (output / "mine").read_text() == "mine" and names(output.parent) == ["bundle"]
