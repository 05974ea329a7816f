"""Tries hostile files in child processes that may not take much memory or time, and says what was tried and found.

    python tests/fuzz.py --seconds 300
    python tests/fuzz.py --only 'graph fields' --seed 1234 --inputs 1

A child takes one seed a line, and answers with a line. One that dies, hangs or answers with anything but success or an
error of edge_spec is a finding, printed with the seed that shows it again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

MEMORY = 6 << 30  # bytes of address space, most of which the libraries only reserve
GROWTH = 1 << 20  # KiB that one input may add to the most memory a child has ever had
SECONDS = 60.0  # for one input, on a machine that does other things too


def attempt(kind: str, seed: int, sound: dict[str, Path], folder: Path, calibration: Any) -> str:
    """Try one input; return what became of it. Raises what nobody should see."""
    import edge_spec
    from edge_spec.bundle import read_manifest
    from edge_spec.errors import EdgeSpecError
    from edge_spec.export import export_pair
    from edge_spec.inspection import describe_bundle
    from hostile_files import CHANGES, write_hostile

    random = Random(seed)
    path = write_hostile(kind, random, sound, folder)
    outcome = "accepted"
    try:
        if CHANGES[kind][0] != "bundle":
            report = export_pair(
                path, None, folder / "out.pair", recipe=random.choice(("fp32", "w8a8")), check=seed % 2 == 0
            )
            path = report.path
        describe_bundle(path, read_manifest(path))
        measured = None if seed % 10 == 0 else calibration
        with edge_spec.load(path, context=64, threads=1, exactness="distribution", calibration=measured) as engine:
            engine.generate("a text", max_new_tokens=4)
            engine.chat([{"role": "user", "content": "Hi"}], max_new_tokens=2)
    except EdgeSpecError as error:
        outcome = type(error).__name__
        if len(str(error)) > 2100:
            raise AssertionError(f"a message of {len(str(error))} characters: {str(error)[:200]}") from error
    if (folder / "out.pair").exists() and outcome == "CheckpointError":
        raise AssertionError("a refused checkpoint left a bundle")
    return outcome


def serve(folder: Path, sound: dict[str, Path]) -> None:
    """Answer the lines of standard input until there are no more."""
    import edge_spec
    from edge_spec.errors import EdgeSpecError

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with edge_spec.load(sound["bundle int4"], context=64, threads=1, calibration="fresh") as engine:
        calibration = engine.calibration
    print("ready", flush=True)
    for line in sys.stdin:
        kind, seed = json.loads(line)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory(dir=folder) as place:
            try:
                answer = ["ok", attempt(kind, seed, sound, Path(place), calibration)]
            except BaseException as error:
                if isinstance(error, EdgeSpecError | KeyboardInterrupt):
                    raise
                answer = ["bad", "".join(traceback.format_exception(error))[-3000:]]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > GROWTH:
            answer = ["bad", f"took {grown >> 10} MiB more ({answer[1]})"]
        print("answer " + json.dumps(answer), flush=True)


class Child:
    """A process that tries inputs, started again when it is lost."""

    def __init__(self, command: list[str], seconds: float = SECONDS) -> None:
        self._command = command
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, kind: str, seed: int) -> tuple[str, str]:
        """Have one input tried: ``ok`` and its outcome, or ``bad`` and what went wrong."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            self._read(b"ready", 120)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seed]).encode() + b"\n")
        self._process.stdin.flush()
        line = self._read(b"answer", self._seconds)
        if line is None:
            status = self._process.poll()
            self.stop()
            return "bad", f"died with status {status}" if status is not None else f"hung for {self._seconds:g} seconds"
        kind, text = json.loads(line.partition(b" ")[2])
        return kind, text

    def _read(self, start: bytes, seconds: float) -> bytes | None:
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                line = self._process.stdout.readline()
                if not line:
                    self._process.wait(10)
                    return None
                if line.startswith(start):
                    return line
        return None

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            self._process = None


def run(seconds: float, inputs: int, seed: int, only: list[str] | None) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Try inputs until the time or their number is up; return how many of each kind had which outcome, and findings."""
    from hostile_files import CHANGES, sources

    kinds = only or list(CHANGES)
    outcomes: Counter[tuple[str, str]] = Counter()
    findings = []
    folder = Path(tempfile.mkdtemp(prefix="edge-spec-fuzz-"))
    os.environ["EDGE_SPEC_CACHE"] = str(folder / "cache")
    try:
        (folder / "sound").mkdir()
        sound = sources(folder / "sound")
        paths = json.dumps({name: str(path) for name, path in sound.items()})
        child = Child([sys.executable, __file__, "--serve", str(folder), paths])
        end = time.monotonic() + seconds
        for index in range(inputs):
            if time.monotonic() > end:
                break
            kind = kinds[index % len(kinds)]
            verdict, text = child.ask(kind, seed + index)
            outcomes[kind, text if verdict == "ok" else "FOUND"] += 1
            if verdict == "bad":
                findings.append(f"{kind!r} with seed {seed + index}: {text}")
                print(findings[-1], flush=True)
        child.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes, findings


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Try hostile files.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="KIND")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        folder, sound = arguments.serve
        serve(Path(folder), {name: Path(path) for name, path in json.loads(sound).items()})
        return 0
    outcomes, findings = run(arguments.seconds, arguments.inputs, arguments.seed, arguments.only)
    for kind in dict.fromkeys(kind for kind, _ in outcomes):
        results = {text: count for (each, text), count in sorted(outcomes.items()) if each == kind}
        print(
            f"{kind:22} {sum(results.values()):6}  " + ", ".join(f"{text} {count}" for text, count in results.items())
        )
    print(f"{sum(outcomes.values())} inputs of {len({kind for kind, _ in outcomes})} kinds, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
