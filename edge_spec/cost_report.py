"""Measured costs as text and as an image, for a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.runtime.calibration import Calibration

_BAR = 40
_SHORT_PAST, _LONG_PAST = 32, 1024
_CATCH_UP_ROWS = (8, 64)


def pasts(context: int) -> tuple[int, ...]:
    """The tokens in the cache to show costs for, as far as they fit ``context``."""
    return tuple(past for past in (_SHORT_PAST, _LONG_PAST) if past < context) or (0,)


def describe_costs(calibration: Calibration, context: int, drafter: str = "draft model") -> str:
    """Return the costs as a table with a bar for each row count, and what there is to say of what drafts.

    Args:
        calibration: what was measured.
        context: most tokens of the cache.
        drafter: what the measured drafts come from, as it is to be called.
    """
    costs, shown = calibration.costs, pasts(context)
    heads = [f"past {past:,}" for past in shown]
    lines = ["target: milliseconds of a call, by rows and by tokens in the cache"]
    lines.append(f"  {'rows':>5}" + "".join(f"{head:>13}" for head in heads) + f"{'to 1 row':>11}")
    one = costs.verify(1, shown[0])
    longest = costs.verify(costs.target.curve.widest, shown[0])
    for rows in costs.target.curve.rows:
        cost = costs.verify(rows, shown[0])
        times = "".join(f"{1e3 * costs.verify(rows, past):>13.2f}" for past in shown)
        lines.append(f"  {rows:>5}{times}{cost / one:>11.2f}  {'█' * max(1, round(_BAR * cost / longest))}")
    lines += ["", *_others(calibration, shown, drafter)]
    return "\n".join(lines)


def costs_to_json(calibration: Calibration, context: int) -> dict[str, Any]:
    """Return the same as numbers: seconds by row count at each past, and the calibration they come from."""
    costs, shown = calibration.costs, pasts(context)
    rows = costs.target.curve.rows
    return {
        "rows": list(rows),
        "verify_seconds": {str(past): [costs.verify(count, past) for count in rows] for past in shown},
        "draft_seconds": {str(past): costs.draft(past) for past in shown} if costs.draft_model is not None else None,
        "overhead_seconds": costs.overhead,
        "draft_agreement": agreement_rate(calibration),
        "calibration": calibration.to_dict(),
    }


def agreement_rate(calibration: Calibration) -> float | None:
    """Share of the target's tokens that the draft model or the head guessed; ``None`` where nothing was compared."""
    pairs = calibration.agreement
    return sum(agreed for _, agreed in pairs) / len(pairs) if pairs else None


def plot_costs(calibration: Calibration, context: int, path: Path, drafter: str = "draft model") -> None:
    """Draw the target's costs by row count into an image; the suffix of ``path`` says which kind.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no image is called so.
    """
    from matplotlib.figure import Figure

    costs = calibration.costs
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = costs.target.curve.rows
    for past in pasts(context):
        axes.plot(rows, [1e3 * costs.verify(count, past) for count in rows], marker="o", label=f"past {past:,}")
    if costs.draft_model is not None:
        step = 1e3 * costs.draft(pasts(context)[0])
        axes.axhline(step, linestyle="--", color="gray", label=f"a step of the {drafter}: {step:.1f} ms")
    axes.set(xlabel="rows of a target call", ylabel="ms", ylim=(0, None), title="What verifying costs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _others(calibration: Calibration, shown: tuple[int, ...], drafter: str) -> Iterator[str]:
    costs = calibration.costs
    if costs.draft_model is None:
        yield "draft model: none"
    else:
        steps = ", ".join(f"{1e3 * costs.draft(past):.2f} at past {past:,}" for past in shown)
        share = costs.draft(shown[0]) / costs.verify(1, shown[0])
        yield f"{drafter}: milliseconds of a step: {steps}; {share:.0%} of a target's"
        catching = ", ".join(f"{1e3 * costs.draft(shown[0], rows):.2f} for {rows}" for rows in _CATCH_UP_ROWS)
        yield f"  catching up on tokens: {catching}"
        rate = agreement_rate(calibration)
        if rate is not None:
            count = len(calibration.agreement)
            yield f"  guesses {rate:.0%} of {count} tokens of a text by the target"
    yield f"overhead: {1e3 * costs.overhead:.2f} ms a round"
