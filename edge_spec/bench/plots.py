"""Plots of a benchmark, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from edge_spec.bench.modes import BASELINE, PLAIN
from edge_spec.bench.summary import Figures, Speedup, Summary

_DPI = 144
_MOST_POSITIONS = 16
_WIDEST = 12.0  # inches
_MOST_UPRIGHT = 24  # bars that have room for their numbers side by side

# Okabe and Ito's colours, which people who see fewer colours tell apart as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_PARTS = (
    ("draft_share", "drafting", "#E69F00"),
    ("verify_share", "verifying", "#0072B2"),
    ("overhead_share", "overhead", "#999999"),
)


def draw_plots(summary: Summary, costs: Mapping[str, Any] | None) -> Iterator[tuple[str, str, bytes]]:
    """Draw what there is something to show of.

    Args:
        summary: the figures.
        costs: curves by model, each with ``rows`` and ``seconds``; ``None`` if nobody measured them.

    Yields:
        File name, title and PNG.
    """
    speculative = [mode for mode in summary.overall if mode not in (PLAIN, BASELINE)]
    colours = {mode: _COLOURS[index % len(_COLOURS)] for index, mode in enumerate([*speculative, BASELINE])}
    compared = [mode for mode in colours if mode in summary.overall]
    if any(summary.overall[mode].decode_speedup for mode in compared):
        yield "speedup.png", "Decoding speedup over plain decoding", _speedup(summary, compared, colours)
    if any(summary.overall[mode].acceptance_by_position for mode in speculative):
        yield "acceptance.png", "Acceptance by position", _acceptance(summary.overall, speculative, colours)
    yield "time_shares.png", "Where the time goes", _time_shares(summary.overall)
    curves = {name: curve for name, curve in (costs or {}).items() if isinstance(curve, Mapping) and "rows" in curve}
    if curves:
        yield "costs.png", "What a call costs", _costs(curves)


def _speedup(summary: Summary, modes: Sequence[str], colours: Mapping[str, str]) -> bytes:
    groups = {**summary.categories, "overall": summary.overall} if len(summary.categories) > 1 else summary.categories
    figure, axes = _canvas(min(max(6.0, 1.6 + 0.45 * len(groups) * (len(modes) + 1)), _WIDEST), 4.2)
    crowded = len(groups) * (len(modes) + 1) > _MOST_UPRIGHT
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        for place, figures in enumerate(groups.values()):
            speedup = figures[mode].decode_speedup if mode in figures else None
            if speedup is not None:
                x = place + (index - (len(modes) - 1) / 2) * width
                label = mode if place == 0 else None
                axes.bar(
                    x,
                    speedup.ratio,
                    width * 0.92,
                    color=colours[mode],
                    label=label,
                    yerr=_error(speedup),
                    capsize=2.5,
                    ecolor="#333333",
                )
                axes.annotate(
                    f"{speedup.ratio:.2f}",
                    (x, 0),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color="white",
                    fontweight="bold",
                    rotation=90 if crowded else 0,
                )
    axes.axhline(1, color="black", linewidth=1, linestyle="--", zorder=3)
    axes.set_xticks(range(len(groups)), [fill(name, 14) for name in groups])
    axes.set_ylabel("decoding speedup (plain decoding = 1)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(axis="x", visible=False)
    figure.legend(*_unique_labels(axes), loc="outside upper center", ncols=min(len(modes), 5), frameon=False)
    return _png(figure)


def _error(speedup: Speedup) -> Any:
    """Return the lengths below and above the bar, float64 [2, 1]; ``None`` without an interval."""
    if speedup.low is None or speedup.high is None:
        return None
    # A skewed sample can leave the ratio outside its own interval; a length is never negative.
    return np.maximum([[speedup.ratio - speedup.low], [speedup.high - speedup.ratio]], 0)


def _acceptance(overall: Mapping[str, Figures], modes: Sequence[str], colours: Mapping[str, str]) -> bytes:
    figure, axes = _canvas(6.0, 4.0)
    for mode in modes:
        shares = overall[mode].acceptance_by_position[:_MOST_POSITIONS]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=5, color=colours[mode], label=mode)
    axes.set_xlabel("position in the proposal")
    axes.set_ylabel("share of the drafted tokens that were emitted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)
    return _png(figure)


def _time_shares(overall: Mapping[str, Figures]) -> bytes:
    figure, axes = _canvas(6.4, 1.6 + 0.45 * len(overall))
    places = range(len(overall))
    left = np.zeros(len(overall))
    for name, label, colour in _PARTS:
        shares = np.array([getattr(figures, name) for figures in overall.values()])
        axes.barh(places, shares, 0.65, left=left, color=colour, label=label)
        for place, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 0.05:
                axes.text(
                    start + share / 2,
                    place,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white",
                    fontweight="bold",
                )
        left += shares
    axes.set_yticks(places, overall)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time spent in rounds")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(axis="y", visible=False)
    figure.legend(*_unique_labels(axes), loc="outside upper center", ncols=len(_PARTS), frameon=False)
    return _png(figure)


def _costs(curves: Mapping[str, Mapping[str, Any]]) -> bytes:
    figure, axes = _canvas(6.0, 4.0)
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(
            curve["rows"],
            [seconds * 1000 for seconds in curve["seconds"]],
            marker="o",
            markersize=5,
            color=colour,
            label=name,
        )
    axes.set_xlabel("rows of the call (tokens computed at once)")
    axes.set_ylabel("time of one call, ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _png(figure)


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty plot; sizes in inches."""
    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _unique_labels(axes: Axes) -> tuple[list[Any], list[Any]]:
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return list(labels.values()), list(labels)


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()
