"""A benchmark from the first check to the last file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.bench.conditions import Conditions
from edge_spec.bench.engines import open_lanes
from edge_spec.bench.machine import describe_machine, peak_memory_bytes
from edge_spec.bench.measurement import Answer, Lane, Skipped, measure
from edge_spec.bench.modes import BASELINE, parse_modes
from edge_spec.bench.prompts import SHIPPED_PROMPTS, alternate, pick, without_template
from edge_spec.bench.settings import Settings
from edge_spec.bench.summary import summarize
from edge_spec.bundle import read_manifest
from edge_spec.device_facts import read_device_facts
from edge_spec.errors import MissingDependencyError, RequestError
from edge_spec.manifest import CHAT_TEMPLATE, Manifest
from edge_spec.prompt_file import Question, read_questions

if TYPE_CHECKING:
    from edge_spec.bench.report import Report

JSON_FILE, MARKDOWN_FILE = "report.json", "report.md"

EXIT_CHANGED = 1


def run_bench(settings: Settings, command_line: str = "", as_json: bool = False) -> int:
    """Measure, print the result and write the report.

    A run that is interrupted or fails reports what it has measured by then, and ends as it would have ended.

    Args:
        settings: what to measure.
        command_line: what was typed, for the report.
        as_json: print the report as JSON instead of tables.

    Returns:
        The exit status: 1 if speculation changed a text that it promised not to change.

    Raises:
        EdgeSpecError: a setting, a prompt file or a bundle is unusable.
    """
    _require_packages(settings.output is not None)
    from edge_spec.bench.report import Report, bundle_facts
    from edge_spec.progress_bars import ProgressBars

    modes = parse_modes(settings.modes)
    manifest = read_manifest(settings.bundle)
    baseline = None if settings.baseline is None else read_manifest(settings.baseline)
    questions = _questions(settings, manifest, baseline)
    if settings.output is not None:
        _require_room(settings.output)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine = describe_machine()  # before its load is ours
    before = begun = read_device_facts()

    turns = sum(1 + len(question.followups) for question in questions)
    planned = settings.repeat * turns * (len(modes) + (baseline is not None))
    answers: list[Answer] = []
    skipped: list[Skipped] = []
    end: BaseException | None = None
    lanes_facts: dict[str, Any] = {}
    try:
        with ProgressBars(measuring=True) as progress:
            done = 0

            def answered(count: int) -> None:
                nonlocal done
                done += count
                progress("measuring", done, planned)

            answered(0)
            for repetition in range(settings.repeat):
                with open_lanes(
                    settings.bundle,
                    modes,
                    settings.baseline,
                    settings.loading,
                    settings.options,
                    settings.shared_engine,
                ) as lanes:
                    lanes_facts = _facts(lanes)
                    for result in measure(lanes, questions, settings.options, repetition, answered):
                        if isinstance(result, Skipped):
                            skipped.append(result)
                        else:
                            if not answers:
                                begun = read_device_facts()  # the clocks have risen by now
                            answers.extend(result)
    except BaseException as error:
        if not answers:
            raise
        end = error
    after = read_device_facts()
    if not answers:
        raise RequestError(
            f"nothing could be measured: every prompt was skipped, the first because: {skipped[0].reason}"
        )

    report = Report(
        date=date,
        command_line=command_line,
        settings={key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
        machine=machine,
        conditions=Conditions(before, begun, after),
        bundle=bundle_facts(settings.bundle, manifest.to_json()),
        baseline=None
        if settings.baseline is None or baseline is None
        else bundle_facts(settings.baseline, baseline.to_json()),
        interruption=None if end is None else _ended_by(end),
        planned=planned,
        peak_memory_bytes=peak_memory_bytes(),
        summary=summarize(answers),
        skipped=skipped,
        answers=answers,
        **lanes_facts,
    )
    _publish(report, settings.output, as_json)
    if end is not None:
        raise end
    return EXIT_CHANGED if report.broken_promises else 0


def _questions(settings: Settings, manifest: Manifest, baseline: Manifest | None) -> list[Question]:
    recorded = settings.replay is not None
    path = settings.replay or settings.prompts or SHIPPED_PROMPTS
    questions = pick(read_questions(path, settings.turns, recorded), settings.category, settings.per_category)
    chats = CHAT_TEMPLATE in manifest.files
    if baseline is not None and chats != (CHAT_TEMPLATE in baseline.files):
        raise RequestError("only one of bundle and baseline has a chat template, so they would not be asked the same.")
    # A log is replayed in its order, since what a drafter has learned by then belongs to the measurement.
    ordered = questions if recorded else alternate(questions)
    return ordered if chats else without_template(ordered)


def _facts(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return what the report says of the loaded engines."""
    engine = lanes[-1].engine if lanes[-1].mode.name != BASELINE else lanes[-2].engine
    modes = [
        {
            "name": lane.mode.name,
            "speculation": lane.mode.speculation,
            "options": dict(lane.mode.options),
            "exactness": lane.engine.exactness,
            "context": lane.engine.context,
        }
        for lane in lanes
    ]
    return {
        "modes": modes,
        "engines": len({id(lane.engine) for lane in lanes}),
        "costs": engine.calibration.costs.to_dict(),
    }


def _publish(report: Report, output: Path | None, as_json: bool) -> None:
    """Write the report and print it, what matters most first."""
    from rich.console import Console

    text = report.to_json()
    # Printed first: hours of measuring must not be lost to a folder that cannot be written.
    if as_json:
        sys.stdout.write(text)
    else:
        console = Console()
        # A file or a pipe has no width that tables would have to keep to.
        report.print(console if console.is_terminal else Console(width=160))
    sys.stdout.flush()
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / JSON_FILE, text.encode())
    write_whole(output / MARKDOWN_FILE, report.to_markdown({}).encode())
    # Drawing takes seconds, which whoever has interrupted the run may not wait for.
    from edge_spec.bench.plots import draw_plots

    plots = {}
    for name, title, png in draw_plots(report.summary, report.costs):
        write_whole(output / name, png)
        plots[name] = title
    write_whole(output / MARKDOWN_FILE, report.to_markdown(plots).encode())
    if not as_json:
        sys.stdout.write(f"report in {output}\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _ended_by(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return "told to end"
    return f"failed ({error})"


def _require_room(output: Path) -> None:
    """Refuse a folder that cannot take the report before hours of measuring, not after."""
    if (output / JSON_FILE).exists():
        raise RequestError(f"{output} holds a report already; name another folder.")
    there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RequestError(f"{output} cannot be written: {there} is not a folder that this user can write to.")


def _require_packages(plots: bool) -> None:
    for package in ("rich", "matplotlib") if plots else ("rich",):
        if find_spec(package) is None:
            raise MissingDependencyError(
                f"edge-spec bench needs the package {package!r}, which is not installed: pip install 'edge-spec[bench]'"
            )
