"""The recipe ``auto``: int4 or w8a8 for each layer class, by what it costs on this device and what it loses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import inf
from pathlib import Path
from typing import Literal

from edge_spec.export.checkpoint import Checkpoint
from edge_spec.export.matrix_cost import ClassCost, class_matrices, measure_class
from edge_spec.export.model import export_model
from edge_spec.export.progress import Progress
from edge_spec.export.recipe import AUTO, RECIPES, Recipe, with_formats

Role = Literal["target", "draft"]

# Time of int4 over that of w8a8 up to which it pays. Less of a gain is within the noise of the measurement.
PAYS = 0.95

# Errors add up only about, so this much more than was predicted, or wanted, is no surprise.
_CLEARLY = 1.25


@dataclass(frozen=True)
class _Aim:
    """What a model is chosen for: rows of its calls, size of int4 blocks, and mean KL in nats that may be lost."""

    rows: tuple[int, ...]
    block_size: int
    limit: float


# A target computes a plain step in 2 rows and verifies a proposal in about 6; a draft decodes row by row. A target's
# divergence is a loss of the answer, so it is to stay below that of int4 alone (0.036 for Qwen2.5-Coder-1.5B on the
# text of the check, where w8a8 has 0.002); a draft's only costs acceptance, which hardly fell up to 0.11.
_AIMS: dict[Role, _Aim] = {"target": _Aim((2, 6), 32, 0.03), "draft": _Aim((1,), 128, 0.15)}


def paying(costs: Mapping[str, ClassCost]) -> tuple[str, ...]:
    """Return the layer classes for which int4 is cheaper by enough to be worth an error."""
    return tuple(layer_class for layer_class, cost in costs.items() if cost.ratio <= PAYS)


def choose_formats(
    costs: Mapping[str, ClassCost], errors: Mapping[str, float], limit: float
) -> dict[str, Literal["w8a8", "int4"]]:
    """Choose the cheapest mix of formats whose errors add up to no more than a limit.

    Args:
        costs: of every layer class.
        errors: mean KL in nats that int4 adds in a layer class alone; needed for those where int4 pays.
        limit: of the sum of errors, in nats. Below zero everything stays w8a8.

    Returns:
        The format of every layer class. Of mixes that cost the same, the one with the least error, then the one with
        the fewest classes in int4.
    """
    classes = paying(costs)

    def error(mix: tuple[str, ...]) -> float:
        return sum(max(0.0, errors[layer_class]) for layer_class in mix)

    def order(mix: tuple[str, ...]) -> tuple[float, float, int]:
        seconds = sum(cost.int4 if layer_class in mix else cost.w8a8 for layer_class, cost in costs.items())
        return seconds, error(mix), len(mix)

    mixes = chain.from_iterable(combinations(classes, count) for count in range(len(classes) + 1))
    chosen = min((mix for mix in mixes if not mix or error(mix) <= limit), key=order)
    return {layer_class: "int4" if layer_class in chosen else "w8a8" for layer_class in costs}


@dataclass(frozen=True)
class Choice:
    """What was chosen for a model.

    Attributes:
        recipe: of the model.
        notes: what was measured, in sentences.
        role: what the model is for.
        predicted: mean KL in nats that is expected of the recipe; ``None`` where no error was measured.
        limit: of the mean KL, in nats, by which the recipe was chosen.
        worst: the layer class in int4 that adds most; ``None`` if there is none.
    """

    recipe: Recipe
    notes: tuple[str, ...]
    role: Role
    predicted: float | None
    limit: float
    worst: str | None

    def warnings(self, measured: float) -> tuple[str, ...]:
        """Say so where the mean KL of what was exported is clearly beyond what was predicted or wanted."""
        if self.worst is None or self.predicted is None:
            return ()
        if measured <= _CLEARLY * self.limit and (measured <= self.limit or measured <= _CLEARLY * self.predicted):
            return ()
        instead = f"with {self.worst} in w8a8, the class that adds most ([{self.role}.formats] of a pair recipe)"
        return (
            f"{self.role}, auto: WARNING: the chosen mix has a mean KL of {measured:.4f} nats, but "
            f"{self.predicted:.4f} were predicted and at most {self.limit:g} wanted: the errors of its formats do not "
            f"add up. Export it with recipe w8a8, or {instead}.",
        )


def choose_recipe(checkpoint: Checkpoint, scratch: Path, role: Role, progress: Progress) -> Choice:
    """Measure cost and error of one model on this device, and choose how it is stored on CPU.

    Args:
        checkpoint: of the model.
        scratch: does not exist; trial graphs are written there, and nothing is left.
        role: what the model is for.
        progress: told about every measurement and trial.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    aim = _AIMS[role]
    costs = _measure_costs(checkpoint, aim, scratch, role, progress)
    base, predicted, errors = 0.0, None, {}
    classes = paying(costs)
    if classes:
        base = _trial(checkpoint, _mix(aim, ()), scratch, f"{role} trial, all w8a8", progress)
        for layer_class in classes:
            stage = f"{role} trial, {layer_class} int4"
            errors[layer_class] = _trial(checkpoint, _mix(aim, (layer_class,)), scratch, stage, progress) - base
    formats = choose_formats(costs, errors, aim.limit - base)
    chosen = tuple(layer_class for layer_class, stored in formats.items() if stored == "int4")
    notes = [_class_note(role, layer_class, costs[layer_class], errors, formats) for layer_class in costs]
    if classes:
        predicted = base + sum(max(0.0, errors[layer_class]) for layer_class in chosen)
        notes.append(
            f"{role}, auto: mean KL {base:.4f} nats with all in w8a8, {predicted:.4f} predicted for this choice (at "
            f"most {aim.limit:g} wanted)."
        )
    worst = max(chosen, key=lambda layer_class: errors[layer_class], default=None)
    return Choice(_mix(aim, chosen), tuple(notes), role, predicted, aim.limit, worst)


def _mix(aim: _Aim, classes: tuple[str, ...]) -> Recipe:
    """The recipe with some layer classes in int4 and the others in w8a8."""
    base = replace(RECIPES["w8a8"], name=AUTO.name, block_size=aim.block_size)
    names = [f"{layer_class} int4" for layer_class in classes]
    formats = dict.fromkeys(classes, "int4")
    if set(classes) == {"attention", "mlp_up", "mlp_down", "lm_head"}:
        # Then nothing of the model is finer, and a tied embedding shares the bytes of lm_head.
        names, formats = ["int4"], {**formats, "embedding": "int4"}
    else:
        names = ["w8a8", *names]
    return replace(with_formats(base, formats), name=f"{AUTO.name} ({', '.join(names)})")


def _measure_costs(
    checkpoint: Checkpoint, aim: _Aim, scratch: Path, role: Role, progress: Progress
) -> dict[str, ClassCost]:
    matrices = class_matrices(checkpoint.architecture)
    stage, costs = f"measure {role}", {}
    for done, (layer_class, shapes) in enumerate(matrices.items()):
        progress(stage, done, len(matrices))
        with _removed(scratch):
            scratch.mkdir()
            costs[layer_class] = measure_class(shapes, aim.rows, aim.block_size, scratch)
    progress(stage, len(matrices), len(matrices))
    return costs


def _trial(checkpoint: Checkpoint, recipe: Recipe, scratch: Path, name: str, progress: Progress) -> float:
    """Mean KL in nats of an export by a recipe, of which nothing is kept."""

    def report(stage: str, done: int, total: int) -> None:
        progress(f"{name}: {stage.split()[0]}", done, total)

    with _removed(scratch):
        # Any number will do here: what is too far off is not chosen.
        record = export_model(checkpoint, scratch, replace(recipe, max_mean_kl=inf), "cpu", True, report)
    assert record.quality is not None  # checked
    return record.quality.mean_kl


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Remove a folder whatever happens."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _class_note(
    role: Role, layer_class: str, cost: ClassCost, errors: Mapping[str, float], formats: Mapping[str, str]
) -> str:
    lost = f"adds {errors[layer_class]:.4f} nats" if layer_class in errors else "does not pay, so no error was measured"
    return (
        f"{role}, auto: {layer_class} is stored as {formats[layer_class]}; int4 takes {cost.ratio:.2f} of the time of "
        f"w8a8 and {lost}."
    )
