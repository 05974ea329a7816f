"""How far a training run is, in a line to read and a line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_spec.distill.held_out import Acceptance

LOG = "training.jsonl"


@dataclass(frozen=True)
class TrainProgress:
    """A moment of a run.

    Attributes:
        step: batches learnt from.
        epochs: how often the texts were read.
        loss: mean over the batches since the last report.
        learning_rate: of the last batch.
        tokens_per_second: learnt since the last report, those of prompts counted in.
        seconds: time spent.
        seconds_left: estimated.
        acceptance: if it was measured just now.
    """

    step: int
    epochs: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds: float
    seconds_left: float
    acceptance: Acceptance | None = None

    def line(self) -> str:
        """One line to read."""
        parts = [
            f"step {self.step:,}",
            f"epoch {self.epochs:.2f}",
            f"loss {self.loss:.3f}",
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.acceptance is not None:
            rates = " ".join(f"{rate:.3f}" for rate in self.acceptance.by_position)
            parts.append(f"held out: accepted {rates}, length {self.acceptance.accepted_length:.2f}")
        parts.append(f"{self.seconds_left / 60:.0f} min left")
        return " | ".join(parts)

    def append_to(self, folder: Path) -> None:
        """Append one line of JSON to the log of a folder."""
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def forget_after(folder: Path, step: int) -> None:
    """Drop what the log of a folder says of later steps: a run that is taken up again does them anew."""
    log = folder / LOG
    if log.exists():
        lines = log.read_text("utf-8", "replace").splitlines(keepends=True)
        kept = "".join(line for line in lines if line.endswith("\n") and _is_until(line, step))
        new = folder / f".{LOG}.new"
        new.write_text(kept, "utf-8")
        new.replace(log)


def _is_until(line: str, step: int) -> bool:
    """Tell whether a line of the log is of a step or an earlier one; what is no line of ours is of none."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
