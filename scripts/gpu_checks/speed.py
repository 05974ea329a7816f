"""What calls and texts cost on the device."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

from edge_spec.runtime.engine import Engine
from edge_spec.runtime.model import Model
from gpu_checks.check import Finding

_PAST = 256
_ROWS = range(1, 17)
_REPEAT = 15
_NEW_TOKENS = 96
_PAIRS = 5
_PROMPT = "The railway reached the valley in 1887 and brought coal, mail and, much later, tourists. "


def call_seconds(model: Model, rows: int, past: int = _PAST, repeat: int = _REPEAT) -> float:
    """Median seconds of a call with so many rows, all of whose logits are wanted."""
    taken = []
    for _ in range(repeat + 3):
        model.cache.rollback(0)
        model.cache.fill(past)
        started = perf_counter()
        model.forward([1] * rows, range(rows))
        taken.append(perf_counter() - started)
    return median(taken[3:])


def check_widths(what: str, model: Model, judges: bool) -> Iterator[Finding]:
    """Measure cost(k) for k = 1 to 16, and judge that of 8 rows, unless this is no device to judge by."""
    cost = {rows: call_seconds(model, rows) for rows in _ROWS}
    shown = " ".join(f"{rows}:{cost[rows] * 1000:.2f}" for rows in (1, 2, 4, 8, 16))
    ratio = cost[8] / cost[1]
    finding = Finding.judged(
        f"{what}: a call of k rows",
        f"{shown} ms; 8 rows take {ratio:.2f} of one",
        "8 rows at most 1.5 of one",
        ratio <= 1.5,
        {str(rows): seconds for rows, seconds in cost.items()},
    )
    yield finding if judges else finding.unjudged()


def check_texts(engine: Engine, judges: bool) -> Iterator[Finding]:
    """Answer plainly and with drafting in turn, and compare texts, speeds, and what lies outside of the calls.

    Args:
        engine: a pair with a draft.
        judges: whether speeds are judged.
    """
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    texts: dict[str, list[list[int]]] = {"off": [], "auto": []}
    shares = []
    for number in range(_PAIRS + 1):
        for speculation in ("off", "auto"):
            with engine.session() as session:
                started = perf_counter()
                answer = session.generate(
                    _PROMPT * (number + 1), max_new_tokens=_NEW_TOKENS, speculation=speculation, stop_token_ids=()
                )
                taken = perf_counter() - started
            if number == 0:  # the first of each warms up
                continue
            rates[speculation].append(len(answer.token_ids) / taken)
            texts[speculation].append(list(answer.token_ids))
            statistics = answer.statistics
            spent = statistics.draft_seconds + statistics.verify_seconds + statistics.overhead_seconds
            if speculation == "off":
                shares.append(statistics.overhead_seconds / spent)
    same = sum(plain == drafted for plain, drafted in zip(texts["off"], texts["auto"], strict=True))
    yield Finding.judged(
        "texts with and without drafting",
        f"{same} of {_PAIRS} alike; level {engine.exactness}",
        "all, where the level is bitwise",
        same == _PAIRS or engine.exactness != "bitwise",
    )
    ratio = median(drafted / plain for plain, drafted in zip(rates["off"], rates["auto"], strict=True))
    speed = Finding.judged(
        "tokens per second",
        f"plain {median(rates['off']):.1f}, drafting {median(rates['auto']):.1f}, ratio {ratio:.2f}",
        "drafting at least 0.98 of plain",
        ratio >= 0.98,
        rates,
    )
    yield speed if judges else speed.unjudged()
    share = median(shares)
    yield Finding.judged("a round outside of the calls", f"{share:.1%} of it", "at most 10%", share <= 0.1, shares)
