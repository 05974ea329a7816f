"""Predictions as text for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from edge_spec.byte_size import size_text
from edge_spec.simulation.prediction import NOTICE, Prediction, TaskPrediction

_HEADINGS = ("TASK", "SPEEDUP", "TOKENS/S", "MAL")
_LENGTH_HEADINGS = ("DRAFTED A ROUND", "AT THE LOW END", "AT THE HIGH END")
# How many tokens rounds draft, as far as they are told apart.
_LENGTHS = ((0, 0), (1, 2), (3, 4), (5, 8), (9, 1000))
_LEGEND = (
    "SPEEDUP is over plain decoding of the same model: at the low end with texts that are hard to draft and rows that "
    "are dear to verify, at the high end with the contrary. MAL: tokens per call of the target."
)


def describe_predictions(name: str, predictions: Sequence[Prediction]) -> str:
    """Return what is predicted for a pair on some devices.

    Args:
        name: of the pair.
        predictions: by device.
    """
    devices = [prediction.device for prediction in predictions]
    sources = dict.fromkeys(source for device in devices for source in device.sources)
    derived = [f"{device.title}: {note}" for device in devices for note in device.notes]
    assumed = dict.fromkeys(assumption for device in devices for assumption in device.assumptions)
    parts = ["\n".join(_lines(name, prediction)) for prediction in predictions]
    parts += [NOTICE, *([_LEGEND] if any(prediction.tasks for prediction in predictions) else [])]
    for title, lines in (("Figures from:", sources), ("Derived:", derived), ("Assumed:", assumed)):
        parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def _lines(name: str, prediction: Prediction) -> Iterator[str]:
    device, plan = prediction.device, prediction.plan
    yield f"{name} on {device.title}: predicted, not measured"
    budget = size_text(plan.budget_bytes or 0)
    if not plan.fits:
        yield f"  memory      does not fit: it takes {size_text(plan.total_bytes)} at least, of {budget}"
        return
    has = plan.configuration
    draft = "with the draft model" if has.draft else "without a draft model"
    yield f"  memory      {size_text(plan.total_bytes)} of {budget}, for {has.context:,} tokens of context, {draft}"
    yield from (f"              {loss}" for loss in plan.given_up)
    yield f"  plain       {prediction.tokens_per_second:.1f} tokens/s, {_basis(prediction)}"
    costs = ", ".join(f"{rows}: {_range(low, high)}" for rows, (low, high) in prediction.call_costs.items())
    yield f"  verifying   a call by its rows, over one of a single row: {costs}"
    if prediction.draft_share is not None:
        yield f"  drafting    a step of the draft model takes {prediction.draft_share:.0%} of one of the target"
    yield from _table([_HEADINGS, *map(_figures, prediction.tasks)])
    yield from _table([_LENGTH_HEADINGS, *map(_drafted, prediction.tasks)])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _basis(prediction: Prediction) -> str:
    published, share = prediction.published, f"{prediction.memory_share:.0%} of the memory's peak"
    if published is None:
        return f"at {share}, as other models reach there"
    return f"at {share}, after the {published.tokens_per_second:g} published for {published.model}"


def _figures(task: TaskPrediction) -> tuple[str, ...]:
    low, high = task.low, task.high
    return (
        task.task,
        _range(low.speedup, high.speedup),
        _range(low.tokens_per_second, high.tokens_per_second, ".0f"),
        _range(low.mean_accepted_length, high.mean_accepted_length, ".1f"),
    )


def _drafted(task: TaskPrediction) -> tuple[str, ...]:
    return task.task, _lengths(task.low.drafted), _lengths(task.high.drafted)


def _range(one: float, other: float, form: str = ".2f") -> str:
    low, high = sorted((one, other))
    texts = format(low, form), format(high, form)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _lengths(drafted: Mapping[int, float]) -> str:
    """Shares of the rounds by how much they draft, for example ``0: 40%, 1-2: 60%``."""
    parts = []
    for low, high in _LENGTHS:
        share = sum(part for length, part in drafted.items() if low <= length <= high)
        if share >= 0.005:
            name = str(low) if low == high else f"{low}-{high}" if high < _LENGTHS[-1][1] else f"{low}+"
            parts.append(f"{name}: {share:.0%}")
    return ", ".join(parts)
