"""Tables of figures, as rows of text, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_spec.bench.summary import Figures, Speedup, Summary

Rows = list[list[str]]

# Positions of a proposal that a table has room for.
_MOST_POSITIONS = 8


def overview(modes: Mapping[str, Figures]) -> tuple[list[str], Rows]:
    """Return heading and rows of a table with a row for each mode."""
    header = ["mode", "identical", "MAL", "acceptance by position", "tokens/s", "TTFT s", "draft / verify / overhead"]
    header += ["decoding speedup", "whole request"]
    has_baseline = any(figures.decode_speedup_over_baseline for figures in modes.values())
    header += ["decoding over baseline", "request over baseline"] if has_baseline else []
    rows = []
    for mode, figures in modes.items():
        shares = (figures.draft_share, figures.verify_share, figures.overhead_share)
        row = [
            mode,
            "" if figures.identical is None else f"{figures.identical} of {figures.answers}",
            f"{figures.mean_accepted_length:.2f}",
            " ".join(f"{share:.2f}".removeprefix("0") for share in figures.acceptance_by_position[:_MOST_POSITIONS]),
            f"{figures.tokens_per_second:.1f}",
            f"{figures.ttft_seconds:.2f}",
            " / ".join(f"{share:.0%}" for share in shares),
            speedup_text(figures.decode_speedup),
            speedup_text(figures.request_speedup),
        ]
        if has_baseline:
            row += [
                speedup_text(figures.decode_speedup_over_baseline),
                speedup_text(figures.request_speedup_over_baseline),
            ]
        rows.append(row)
    return header, rows


def by_category(summary: Summary, name: str) -> tuple[list[str], Rows] | None:
    """Return a table of one speedup with a row for each category; ``None`` if no mode has it."""
    modes = [mode for mode, figures in summary.overall.items() if getattr(figures, name) is not None]
    if not modes:
        return None
    rows = [
        [category, *(speedup_text(getattr(figures[mode], name) if mode in figures else None) for mode in modes)]
        for category, figures in [*summary.categories.items(), ("overall", summary.overall)]
    ]
    return ["category", *modes], rows


def speedup_text(speedup: Speedup | None) -> str:
    """Return for example ``1.62 [1.48, 1.77]``."""
    if speedup is None:
        return ""
    if speedup.low is None or speedup.high is None:
        return f"{speedup.ratio:.2f}"
    return f"{speedup.ratio:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]"


def markdown(header: Sequence[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
