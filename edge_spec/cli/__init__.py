"""The command line; each command has a module.

Every command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType

from edge_spec import __version__
from edge_spec.cli import bench, calibrate, chat, demo, distill, export, inspect, plan, run, serve, simulate
from edge_spec.errors import EdgeSpecError, QualityError

EXIT_QUALITY = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = (export, distill, run, chat, serve, bench, calibrate, simulate, plan, inspect, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: arguments without the program's name; those of the process if ``None``.
    """
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words, argparse.Namespace(words=words))
    try:
        with _ending_in_order():
            status: int = arguments.command(arguments)
            sys.stdout.flush()
    except EdgeSpecError as error:
        return _fail(str(error), EXIT_QUALITY if isinstance(error, QualityError) else EXIT_ERROR)
    except ModuleNotFoundError as error:
        # What 'run' needs is checked where it is imported; the rest belongs to the heavy stage.
        if error.name is None or error.name.startswith("edge_spec"):
            raise
        extra = {"matplotlib": "bench", "torch": "distill"}.get(error.name, "export")
        return _fail(f"this needs the package {error.name!r}, which is not installed: pip install 'edge-spec[{extra}]'")
    except KeyboardInterrupt as interrupt:
        print("", *interrupt.args, sep="\n", file=sys.stderr)  # not behind the ^C that the terminal shows
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # Files of bundles and checkpoints have errors of their own; what is left is our output, on a full disk, say.
        _discard_output()
        return _fail(f"cannot read or write {error.filename or 'the standard streams'}: {error.strerror or error}")
    return status


def _fail(message: str, status: int = EXIT_ERROR) -> int:
    """Say what went wrong, if anybody can hear it, and return the exit status."""
    with suppress(OSError):
        # What files say of themselves must not move the cursor.
        shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
        print(f"edge-spec: error: {shown}", file=sys.stderr)
    return status


def _prepare_streams() -> None:
    """See that standard streams exist, and that stdout takes any text, whatever its encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent; a file opened later would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Point stdout elsewhere, since Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """On SIGTERM and SIGHUP leave through every ``finally``, as on Ctrl-C: an export takes its unfinished folder along.

    Signals that somebody has arranged for already (``nohup``) are left to them.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        raise SystemExit(128 + number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        ours = []
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; the parsed ``command`` is the function to call with the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="edge-spec",
        description="Lossless speculative decoding for one user on a small machine.",
        epilog="'edge-spec COMMAND --help' explains a command and shows an example.",
        formatter_class=_CommandsFormatter,
    )
    parser.add_argument("--version", action="version", version=f"edge-spec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


class _CommandsFormatter(argparse.HelpFormatter):
    """Counts the indentation of commands, which argparse forgets, so that a long name has its summary beside it."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment
