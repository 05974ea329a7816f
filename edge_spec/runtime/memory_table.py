"""A memory plan as text for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edge_spec.byte_size import size_text
from edge_spec.runtime.configuration import Configuration

if TYPE_CHECKING:
    from edge_spec.runtime.memory import GivenUp, MemoryPlan

_BAR = 24
_LABEL, _SIZE = 18, 10
_BASES = {"exact": "exact", "law": "estimated", "measured": "measured here"}

_WORDS = {
    "context": "tokens of context",
    "target_kv": "target's keys and values",
    "draft": "draft model",
    "draft_kv": "draft's keys and values",
    "draft_window": "tokens of the draft's window",
    "widest": "draft tokens of a round",
    "conversations": "conversations kept",
}
# What giving something up means for the text: everything else costs speed alone.
_REMARKS = {
    "target_kv": "THIS CHANGES THE TEXT A LITTLE",
    "context": "prompt and answer together have to be shorter",
}


def describe_plan(plan: MemoryPlan) -> str:
    """Return the items with their shares, the configuration, what was given up and what more memory would bring."""
    lines = [_summary(plan), ""]
    most = max(item.bytes for item in plan.items)
    for item in plan.items:
        if item.bytes:
            bar = "█" * max(1, round(_BAR * item.bytes / most))
            share = f"{item.bytes / plan.total_bytes:4.0%}"
            lines.append(
                f"  {item.name:<{_LABEL}}{size_text(item.bytes):>{_SIZE}} {share}  {bar:<{_BAR}}  {_BASES[item.basis]}"
            )
    lines += [f"  {'peak':<{_LABEL}}{size_text(plan.total_bytes):>{_SIZE}} 100%", "", describe_configuration(plan)]
    if plan.given_up:
        lines += ["", "given up, the least missed first:", *(f"  {loss}" for loss in plan.given_up)]
    if plan.next_larger is not None:
        back = ", ".join(_brought(plan.configuration, plan.next_larger.configuration))
        lines += ["", f"a budget of {size_text(plan.next_larger.budget_bytes, up=True)} would bring: {back}"]
    return "\n".join(lines)


def describe_configuration(plan: MemoryPlan) -> str:
    """Return what the plan decides, in one line."""
    has = plan.configuration
    draft = (
        f"draft model with a window of {has.draft_window:,} tokens in {has.draft_kv}" if has.draft else "no draft model"
    )
    texts = "1 conversation" if has.conversations == 1 else f"{has.conversations} conversations"
    return (
        f"{has.context:,} tokens of context, {texts}, keys and values in {has.target_kv}; "
        f"up to {has.widest} draft tokens a round; {draft}"
    )


def _summary(plan: MemoryPlan) -> str:
    total = size_text(plan.total_bytes)
    if plan.budget_bytes is None:
        return f"{total} at the peak; no limit was given"
    budget = size_text(plan.budget_bytes)
    if not plan.fits:
        return f"{size_text(plan.total_bytes, up=True)} at the peak do not fit a budget of {budget}"
    return f"{total} at the peak, of a budget of {budget} ({plan.total_bytes / plan.budget_bytes:.0%})"


def describe_loss(given_up: GivenUp) -> str:
    """Return what was given up, what the budget lacks for it, and what that means for the text, in one line."""
    missing = (
        f"lacks {size_text(given_up.missing_bytes)}" if given_up.missing_bytes else "lacks what is listed below it"
    )
    remark = f"; {_REMARKS[given_up.what]}" if given_up.what in _REMARKS else ""
    change = "" if given_up.what == "draft" else f" {_value(given_up.wished)} -> {_value(given_up.planned)}"
    return f"{_WORDS[given_up.what]}{change}: the budget {missing}{remark}"


def _brought(now: Configuration, then: Configuration) -> Iterator[str]:
    """What differs, the most valuable first. What is given up in exchange is named as well."""
    for what, words in _WORDS.items():
        had, has = getattr(now, what), getattr(then, what)
        if had == has or (what.startswith("draft_") and not (now.draft and then.draft)):
            continue
        if what == "draft":
            window = f" with a window of {then.draft_window:,} tokens" if has else ""
            yield f"{'a' if has else 'no'} {words}{window}"
        else:
            yield f"{_value(has)} {words}" if isinstance(has, int) else f"{words} in {has}"


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
