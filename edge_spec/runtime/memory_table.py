"""A memory plan as text for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edge_spec.byte_size import size_text
from edge_spec.runtime.configuration import Configuration

if TYPE_CHECKING:
    from edge_spec.runtime.drafter_outlook import Outlook
    from edge_spec.runtime.memory_law import MemoryItem
    from edge_spec.runtime.memory_plan import GivenUp, MemoryPlan

_BAR = 24
_LABEL, _SIZE = 18, 10
_BASES = {"exact": "exact", "law": "estimated", "measured": "measured here"}

_WORDS = {
    "context": "tokens of context",
    "target_kv": "target's keys and values",
    "draft": "draft model",
    "head": "head",
    "draft_device": "draft model's device",
    "draft_kv": "draft's keys and values",
    "draft_window": "tokens of the draft's window",
    "widest": "draft tokens of a round",
    "conversations": "conversations kept",
}
_DRAFTERS = {"head": "head", "model": "draft model"}
_POOLS = {
    "unified": "for a GPU that shares the machine's memory, which counts once (Jetson)",
    "discrete": "for a GPU with memory of its own; the budget is about that, and what lies on the host is beside it",
}
# What giving something up means for the text: everything else costs speed alone.
_REMARKS = {
    "target_kv": "THIS CHANGES THE TEXT A LITTLE",
    "context": "prompt and answer together have to be shorter",
}


def describe_plan(plan: MemoryPlan) -> str:
    """Return the items with their shares, the configuration, what was given up and what more memory would bring."""
    lines = [_summary(plan), ""]
    lines += _rows(plan)
    lines += ["", describe_configuration(plan)]
    if len(plan.outlooks) > 1:
        lines += ["", describe_choice(plan)]
    if plan.on_cpu is not None:
        lines += ["", f"as well possible, and taken if it is faster here: {describe_configuration(plan.on_cpu)}"]
    if plan.given_up:
        lines += ["", "given up, the least missed first:", *(f"  {loss}" for loss in plan.given_up)]
    if plan.next_larger is not None:
        back = ", ".join(_brought(plan.configuration, plan.next_larger.configuration))
        lines += ["", f"a budget of {size_text(plan.next_larger.budget_bytes, up=True)} would bring: {back}"]
    return "\n".join(lines)


def _rows(plan: MemoryPlan) -> Iterator[str]:
    """A line for each item, and below those of each pool its peak."""
    if plan.pools == "discrete":
        on_host = [item for item in plan.items if item.place == "host"]
        yield from _pool(plan.budgeted, "on the GPU", plan.total_bytes)
        yield ""
        yield from _pool(on_host, "on the host", plan.host_bytes)
    else:
        yield from _pool(plan.items, "peak", plan.total_bytes, shown=plan.pools == "unified")


def _pool(items: Sequence[MemoryItem], name: str, total: int, shown: bool = False) -> Iterator[str]:
    most = max(item.bytes for item in items)
    for item in items:
        if item.bytes:
            bar = "█" * max(1, round(_BAR * item.bytes / most))
            place = f" {item.place:<6}" if shown else ""
            yield (
                f"  {item.name:<{_LABEL}}{size_text(item.bytes):>{_SIZE}} {item.bytes / total:4.0%} {place} "
                f"{bar:<{_BAR}}  {_BASES[item.basis]}"
            )
    yield f"  {name:<{_LABEL}}{size_text(total):>{_SIZE}} 100%"


def describe_configuration(plan: MemoryPlan) -> str:
    """Return what the plan decides, in one line."""
    has = plan.configuration
    where = " on the CPU" if has.draft_device == "cpu" and plan.pools != "cpu" else ""
    draft = f"draft model{where} with a window of {has.draft_window:,} tokens in {has.draft_kv}"
    if has.head:
        draft = "head that drafts from the target's hidden states"
    elif not has.draft:
        draft = "neither head nor draft model" if plan.outlooks else "no draft model"
    texts = "1 conversation" if has.conversations == 1 else f"{has.conversations} conversations"
    return (
        f"{has.context:,} tokens of context, {texts}, keys and values in {has.target_kv}; "
        f"up to {has.widest} draft tokens a round; {draft}"
    )


def describe_choice(plan: MemoryPlan) -> str:
    """Return which of head and draft model a plan loads, and why not the other, in one sentence."""
    preferred, other = plan.outlooks
    has = plan.configuration
    loaded = "head" if has.head else "model" if has.draft else None
    than = "more for each byte than" if preferred.gain > 0.0 else "less lost than"
    why = f"{_expected(preferred)}, {than} {_expected(other)}"
    if loaded == preferred.drafter:
        return f"of the two the {_DRAFTERS[loaded]} is loaded: {why}"
    short = any(loss.what in ("draft", "head") for loss in plan.given_up)
    what = "neither" if loaded is None else f"the {_DRAFTERS[loaded]}"
    return f"of the two {what} is loaded {'for want of memory' if short else 'as asked for'}: {why}"


def _expected(outlook: Outlook) -> str:
    basis = "as measured here" if outlook.basis == "measured" else "by its size"
    gain = f"{outlook.gain:+.0%} speed for {size_text(outlook.bytes)} ({basis})"
    return f"the {_DRAFTERS[outlook.drafter]} is expected to bring {gain}"


def _summary(plan: MemoryPlan) -> str:
    if plan.pools == "cpu":
        return _against_budget(plan)
    host = ""
    if plan.host_bytes:
        limit = plan.host_budget_bytes
        host = f"; {size_text(plan.host_bytes)} on the host"
        if limit is not None:
            host += f"{', of' if plan.host_bytes <= limit else ' do not fit its'} {size_text(limit)}"
    return f"{_against_budget(plan)}{host}\nplanned {_POOLS[plan.pools]}"


def _against_budget(plan: MemoryPlan) -> str:
    total = size_text(plan.total_bytes)
    if plan.budget_bytes is None:
        return f"{total} at the peak; no limit was given"
    budget = size_text(plan.budget_bytes)
    if plan.total_bytes > plan.budget_bytes:
        return f"{size_text(plan.total_bytes, up=True)} at the peak do not fit a budget of {budget}"
    return f"{total} at the peak, of a budget of {budget} ({plan.total_bytes / plan.budget_bytes:.0%})"


def describe_loss(given_up: GivenUp) -> str:
    """Return what was given up, what the budget lacks for it, and what that means for the text, in one line."""
    missing = (
        f"lacks {size_text(given_up.missing_bytes)}" if given_up.missing_bytes else "lacks what is listed below it"
    )
    if given_up.host_missing_bytes:
        missing += f" and the host {size_text(given_up.host_missing_bytes)}"
    remark = f"; {_REMARKS[given_up.what]}" if given_up.what in _REMARKS else ""
    change = "" if given_up.what in ("draft", "head") else f" {_value(given_up.wished)} -> {_value(given_up.planned)}"
    return f"{_WORDS[given_up.what]}{change}: the budget {missing}{remark}"


def _brought(now: Configuration, then: Configuration) -> Iterator[str]:
    """What differs, the most valuable first. What is given up in exchange is named as well."""
    for what, words in _WORDS.items():
        had, has = getattr(now, what), getattr(then, what)
        if had == has or (what.startswith("draft_") and not (now.draft and then.draft)):
            continue
        if what == "draft_kv" and now.draft_device != then.draft_device:
            continue
        if what in ("draft", "head"):
            window = f" with a window of {then.draft_window:,} tokens" if has and what == "draft" else ""
            yield f"{'a' if has else 'no'} {words}{window}"
        elif what == "draft_device":
            yield f"the draft model on the {'GPU' if has == 'cuda' else 'CPU'}"
        else:
            yield f"{_value(has)} {words}" if isinstance(has, int) else f"{words} in {has}"


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
