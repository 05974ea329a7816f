"""The report of a benchmark: as JSON for programs, as Markdown and on a terminal for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_spec.bench.conditions import Conditions, describe
from edge_spec.bench.measurement import Answer, Skipped
from edge_spec.bench.summary import Summary
from edge_spec.bench.tables import Rows, by_category, markdown, overview
from edge_spec.byte_size import size_text

_FORMAT = "edge-spec benchmark"
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """Everything a run found out.

    Attributes:
        date: when it began, in ISO 8601.
        command_line: what was typed.
        settings: what was asked for, defaults included.
        machine: what it ran on.
        conditions: how that was set, and its clocks: before, once the first answers were there, and after the last.
        bundle, baseline: facts about what was decoded.
        modes: name, options and level of exactness of each.
        interruption: what ended the run early; ``None`` if it is complete.
        planned: answers that a complete run has.
        peak_memory_bytes: of the process, all engines together.
        engines: how many those were.
        costs: what the engine measured of its models' calls, if it does.
        summary: figures.
        skipped: turns that could not be asked.
        answers: the raw records.
    """

    date: str
    command_line: str
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    conditions: Conditions
    bundle: Mapping[str, Any]
    baseline: Mapping[str, Any] | None
    modes: Sequence[Mapping[str, Any]]
    interruption: str | None
    planned: int
    peak_memory_bytes: int
    engines: int
    costs: Mapping[str, Any] | None
    summary: Summary
    skipped: Sequence[Skipped]
    answers: Sequence[Answer]

    @property
    def broken_promises(self) -> list[str]:
        """Modes that changed a text although they promise the same tokens as plain decoding."""
        bitwise = {mode["name"]: mode["exactness"] == self.modes[0]["exactness"] == "bitwise" for mode in self.modes}
        coupled = {mode["name"]: mode["options"].get("verification", "coupled") == "coupled" for mode in self.modes}
        changed = {answer.mode for answer in self.answers if answer.identical is False}
        changed_greedily = {answer.mode for answer in self.answers if answer.identical is False and not answer.sampled}
        return [name for name in bitwise if bitwise[name] and name in (changed if coupled[name] else changed_greedily)]

    def to_json(self) -> str:
        """Return everything as JSON, the raw records a line each."""
        body = {"format": _FORMAT, "schema_version": _SCHEMA_VERSION, **asdict(self)}
        body["conditions"]["warnings"] = self.conditions.warnings()
        records = ",\n  ".join(json.dumps(record, ensure_ascii=False) for record in body.pop("answers"))
        head = json.dumps(body, indent=1, ensure_ascii=False)
        return f'{head[:-2]},\n "answers": [\n  {records}\n ]\n}}\n'

    def to_markdown(self, plots: Mapping[str, str]) -> str:
        """Return tables and the notes a reader needs.

        Args:
            plots: titles of the plots by file name.
        """
        categories = self.summary.categories
        parts = [
            f"# Benchmark of {self.bundle['name']}",
            *self.notes(),
            "## Overall",
            markdown(*overview(self.summary.overall)),
        ]
        for title, name in (
            ("Decoding speedup by category", "decode_speedup"),
            ("Whole-request speedup by category", "request_speedup"),
            ("Decoding speedup over the baseline by category", "decode_speedup_over_baseline"),
        ):
            table = by_category(self.summary, name)
            if len(categories) > 1 and table is not None:
                parts += [f"## {title}", markdown(*table)]
        parts += [f"![{title}]({file})" for file, title in plots.items()]
        if len(categories) > 1:
            for category, modes in categories.items():
                parts += [f"## {category[:1].upper()}{category[1:]}", markdown(*overview(modes))]
        parts += ["## Machine and bundle", markdown(["", ""], self._facts())]
        if self.skipped:
            rows = [[skip.question, skip.category, str(skip.turn + 1), skip.reason] for skip in self.skipped]
            parts += ["## Skipped", markdown(["question", "category", "turn", "why"], rows)]
        return "\n\n".join(parts) + "\n"

    def notes(self) -> list[str]:
        """Say in sentences how the figures came about and what limits them."""
        plain = next(iter(self.summary.overall.values()))
        sampling = f"temperature {self.settings['temperature']:g}"
        if self.settings["temperature"]:
            sampling += f", seed {self.settings['seed']}"
        if self.settings["replay"]:
            sampling += ", where the log does not ask for something else"
        notes = [
            f"Prompts: {plain.questions}; answers by each mode: {plain.answers}, of at most "
            f"{self.settings['max_new_tokens']} tokens each, {sampling}. Every prompt was answered by all modes in "
            "turn, in changing order. Speedups are ratios of time per token; in brackets the 95% interval of a "
            "bootstrap over prompts."
        ]
        if self.interruption is not None:
            notes.append(
                f"**Incomplete:** {self.interruption} after {len(self.answers)} of {self.planned} answers. The "
                "figures cover what was measured until then."
            )
        notes += [f"**Doubtful:** {warning}" for warning in self.conditions.warnings()]
        if self.skipped:
            notes.append(f"**Skipped:** {len(self.skipped)} turns could not be asked, see below.")
        if self.broken_promises:
            notes.append(f"**Changed text**, although bitwise: {', '.join(self.broken_promises)}. This is a fault.")
        if any(mode["exactness"] == "distribution" for mode in self.modes):
            notes.append("At exactness `distribution` a mode follows the law of plain decoding, not its every token.")
        unkeyed = [mode for mode in self.modes if mode["options"].get("verification", "coupled") != "coupled"]
        if unkeyed and any(answer.sampled for answer in self.answers):
            notes.append("With another rule than `coupled`, sampled text is another sample of the same law.")
        return notes

    def print(self, console: Console) -> None:
        """Show the tables on a terminal."""
        for note in self.notes():
            console.print(note.replace("**", "").replace("`", ""), highlight=False, markup=False)
        _print(console, "overall", *overview(self.summary.overall))
        table = by_category(self.summary, "decode_speedup")
        if len(self.summary.categories) > 1 and table is not None:
            _print(console, "decoding speedup", *table)
        for skip in self.skipped:
            console.print(
                f"skipped: question {skip.question}, turn {skip.turn + 1}: {skip.reason}", highlight=False, markup=False
            )
        for name, text in self._device():
            if text:
                console.print(f"{name}: {text}", highlight=False, markup=False)
        console.print(f"peak memory {size_text(self.peak_memory_bytes)}, {self._engines()}", highlight=False)

    def _engines(self) -> str:
        return f"{self.engines} engine{'s' * (self.engines > 1)} in one process"

    def _device(self) -> Rows:
        """How the device was set and clocked, as far as anything is known of that."""
        return [["device, first", describe(self.conditions.begun)], ["device, last", describe(self.conditions.after)]]

    def _facts(self) -> Rows:
        machine = self.machine
        memory = machine["memory_bytes"]
        cores = f"{machine['physical_cores'] or 'unknown number of'} physical, {machine['usable_cores']} usable"
        rows = [
            ["date", self.date],
            ["command", f"`{self.command_line}`"],
            ["processor", f"{machine['processor']} ({machine['architecture']})"],
            ["cores", cores],
            ["threads", str(self.settings["threads"] or "one per physical core")],
            *(row for row in self._device() if row[1]),
            ["load before the run", f"{machine['load_average']:.2f}"],
            ["memory", "unknown" if memory is None else size_text(memory)],
            ["peak memory", f"{size_text(self.peak_memory_bytes)}, {self._engines()}"],
            ["system", f"{machine['system']}, Python {machine['python']}"],
            ["versions", f"edge-spec {machine['edge_spec']}, ONNX Runtime {machine['onnxruntime']}"],
        ]
        for role, facts in (("bundle", self.bundle), ("baseline", self.baseline)):
            if facts is not None:
                models = ", ".join(
                    f"{facts[part]['recipe']} {part} from {facts[part]['source']}"
                    for part in ("target", "draft")
                    if facts[part]
                )
                rows.append(
                    [role, f"{facts['name']}: {models}; {size_text(facts['bytes'])}; digest `{facts['digest']}`"]
                )
        rows += [[f"mode `{mode['name']}`", f"exactness {mode['exactness']}"] for mode in self.modes]
        return rows


def bundle_facts(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a bundle, from its manifest's JSON."""

    def model(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if facts is None:
            return None
        return {
            "source": Path(facts["source"]).name,
            "source_sha256": facts["source_sha256"],
            "recipe": facts["recipe"]["name"],
            "architecture": facts["architecture"],
        }

    return {
        "name": path.resolve().name,
        "device": manifest["device"],
        "created_by": manifest["created_by"],
        "digest": manifest["digest"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "target": model(manifest["target"]),
        "draft": model(manifest["draft"]),
    }


def _print(console: Console, title: str, header: Sequence[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left")
    for name in header:
        is_name = name in ("mode", "category")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        table.add_row(*map(Text, row))  # names are no markup
    console.print(table)
