"""How the demo looks: two columns that fill up on a terminal, plain paragraphs elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from time import monotonic

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from edge_spec.demo.race import Lane, Outcome

ACCEPTED = "bold green"
FRAME_SECONDS = 0.08


def print_legend(console: Console, has_head: bool) -> None:
    """Say what will be seen, of a model that has a head or has none."""
    small = ", and by a small network that reads what the model has computed" if has_head else ""
    example = Text("like this", ACCEPTED) if console.is_terminal else Text("[like this]")
    legend = Text.assemble(
        "One model answers twice. Plainly, every token takes one call of the model. Speculatively, the next tokens are "
        f"guessed from the text so far and from what the model thought of before{small}; one call checks several, and "
        "those it accepted are shown ",
        example,
        ".",
    )
    console.print()
    console.print(legend)


@contextmanager
def open_view(console: Console, title: str, prompt: str, lanes: Sequence[Lane]) -> Iterator[Callable[[], None]]:
    """Show the lanes of one prompt; call what is given whenever they have moved on."""
    console.print()
    console.print(Rule(title, style="dim"))
    console.print(Text(prompt, "italic"))
    console.print()
    if not console.is_terminal:
        yield lambda: None
        for lane in lanes:
            console.print(Text(f"{lane.title}: {_progress(lane)}"))
            console.print(_bracketed(lane))
            console.print()
        return

    # Refreshed by hand between two rounds: a thread that draws would take time from the one that computes.
    with Live(_columns(lanes), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        drawn = monotonic()

        def update() -> None:
            nonlocal drawn
            if monotonic() - drawn >= FRAME_SECONDS:
                live.update(_columns(lanes), refresh=True)
                drawn = monotonic()

        yield update
        live.update(_columns(lanes), refresh=True)


def print_summary(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Show the figures of every prompt and say what they mean."""
    table = Table(
        caption="tokens/s count the time for the prompt; speedup is the ratio of the two times", caption_style="dim"
    )
    table.add_column("prompt", overflow="fold")
    for heading in (
        "tokens",
        "identical",
        "plain\ntokens/s",
        "speculative\ntokens/s",
        "mean accepted\nlength",
        "speedup",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    for number, outcome in enumerate(outcomes, 1):
        table.add_row(str(number), *_figures(outcome))
    total = Outcome.total(outcomes)
    if len(outcomes) > 1:
        table.add_section()
        table.add_row("all", *_figures(total), style="bold")
    console.print()
    console.print(table)
    console.print(Text(verdict(outcomes)))


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Say in words what the figures mean, whatever they are."""
    total = Outcome.total(outcomes)
    if not total.identical:
        return "The two ways did not give the same tokens. That must not happen: please report it with your processor."
    same = "Identical: yes, token for token."
    if total.speedup > 1.03:
        speed = f"Speculation was {total.speedup:.2f} times as fast"
    elif total.speedup < 0.97:
        speed = f"Speculation was slower here, {total.speedup:.2f} times as fast"
    else:
        speed = f"Speculation made no difference to the speed ({total.speedup:.2f} times as fast)"
    speedups = [outcome.speedup for outcome in outcomes]
    if len(speedups) > 1:
        speed += f" over all prompts, from {min(speedups):.2f} to {max(speedups):.2f}"
    why = " An answer that is hard to guess gains nothing and pays for wrong guesses."
    return f"{same} {speed}." + (why if min(speedups) < 1 else "")


def _figures(outcome: Outcome) -> tuple[str, ...]:
    return (
        str(outcome.tokens),
        "yes" if outcome.identical else "NO",
        f"{outcome.plain_speed:.1f}",
        f"{outcome.speculative_speed:.1f}",
        f"{outcome.mean_accepted_length:.2f}",
        f"{outcome.speedup:.2f}x",
    )


def _columns(lanes: Sequence[Lane]) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in lanes:
        grid.add_column(ratio=1)
    grid.add_row(*map(_panel, lanes))
    return Group(grid)


def _panel(lane: Lane) -> Panel:
    text = Text.assemble(*((piece, ACCEPTED if accepted else "") for piece, accepted in lane.pieces))
    running = lane.completion is None
    return Panel(
        text.append("▌" if running else "", "dim"),
        title=Text(lane.title, "bold"),
        subtitle=Text(_progress(lane)),
        border_style="dim" if running else "green",
    )


def _bracketed(lane: Lane) -> Text:
    runs = groupby(((piece, accepted) for piece, accepted in lane.pieces if piece), key=lambda item: item[1])
    joined = ((accepted, "".join(piece for piece, _ in run)) for accepted, run in runs)
    return Text("".join(f"[{text}]" if accepted else text for accepted, text in joined))


def _progress(lane: Lane) -> str:
    return f"{lane.tokens} tokens, {lane.seconds:.1f} s, {lane.tokens_per_second:.1f} tokens/s"
