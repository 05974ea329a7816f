"""A training run on disk, to be taken up again where it was saved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from edge_spec.errors import EdgeSpecError

STATE = "training.state"
# What a draft's weights are called in there, whatever its kind: runs that began with heads can go on.
_WEIGHTS = "head"
# No run counts further.
_MOST = 1 << 62


@dataclass
class TrainingState:
    """How far a run is.

    Attributes:
        step: batches learnt from.
        epoch: the epoch of the next batch, counted from 0.
        batch: the next batch in its epoch.
        tokens: tokens read, those of prompts too.
        seconds: time spent, of earlier parts of the run too.
        best_length: the best accepted length that was measured.
        worse: measurements since.
        finished: why the run is over; empty while it is not.
        all_steps: whether the draft learns from all of its steps by now, and not from the first one alone.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_length: float = -1.0
    worse: int = 0
    finished: str = ""
    all_steps: bool = False

    def save(
        self, folder: Path, run: dict[str, Any], network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Replace what was saved before; a kill leaves the one or the other.

        Args:
            folder: exists.
            run: what the run is made of; must be the same when it is taken up again.
            network: its weights are saved.
            optimizer: its state is saved.
        """
        temporary = folder / f".{STATE}.new"
        weights = network.state_dict()
        saved = {"run": run, "state": vars(self), _WEIGHTS: weights, "optimizer": optimizer.state_dict()}
        with temporary.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / STATE)

    @classmethod
    def load(
        cls, folder: Path, run: dict[str, Any], network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> TrainingState:
        """Take up what was saved in a folder, or begin.

        Raises:
            EdgeSpecError: what was saved is another run, or damaged.
        """
        path = folder / STATE
        if not path.exists():
            return cls()
        with _readable(path):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            earlier = dict(saved["run"])
        _require_same(path, earlier, run, {**run, **earlier})
        with _readable(path):
            network.load_state_dict(saved[_WEIGHTS])
            optimizer.load_state_dict(saved["optimizer"])
            state = cls(**saved["state"])
            state._require_sound()
        return state

    @staticmethod
    def check(folder: Path, known: Mapping[str, Any]) -> None:
        """Tell early that :meth:`load` would fail.

        Args:
            folder: of the run; there may be nothing yet.
            known: of what the run is made of, as far as it can be known.

        Raises:
            EdgeSpecError: what was saved is another run, or damaged.
        """
        path = folder / STATE
        if path.exists():
            with _readable(path):
                earlier = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["run"])
            _require_same(path, earlier, known, known)

    def _require_sound(self) -> None:
        """Raise ValueError for what no run has saved."""
        for name in ("step", "epoch", "batch", "tokens", "worse"):
            if type(getattr(self, name)) is not int or not 0 <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} is no count")
        for name, least in (("seconds", 0.0), ("best_length", -1.0)):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or value < least:
                raise ValueError(f"{name} is no number from {least:g} on")
        if not isinstance(self.finished, str):
            raise ValueError("finished is no text")
        if type(self.all_steps) is not bool:
            raise ValueError("all_steps is neither true nor false")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Tell what goes wrong while a saved state is read."""
    try:
        yield
    except Exception as error:  # torch raises whatever its archive reader and unpickler do
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, UnpicklingError):  # torch says how to let it run what it holds
            reason = "it holds other things than numbers and weights"
        raise EdgeSpecError(
            f"{path} cannot be read ({reason}); remove it to begin anew, or name another folder."
        ) from error


def _require_same(path: Path, earlier: Mapping[str, Any], run: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise EdgeSpecError for the first of these names whose values differ."""
    for name in names:
        if run.get(name) != earlier.get(name):
            raise EdgeSpecError(
                f"{path} was saved by a run with {name} {earlier.get(name)!r}, not {run.get(name)!r}; give what it was "
                "begun with, remove it to begin anew, or name another folder."
            )
