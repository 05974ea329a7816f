"""What an engine can go on without: the order in which it gives memory back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_spec.runtime.cache_pool import CachePool
from edge_spec.runtime.drafter_pool import DrafterPool
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.protocol import CostlyDrafter
from edge_spec.runtime.drafters.suffix import SuffixDrafter
from edge_spec.runtime.loaded_pair import LoadedPair
from edge_spec.runtime.memory_plan import MemoryPlan
from edge_spec.runtime.model import Model
from edge_spec.runtime.pressure import Sheddable

# A draft's cache under pressure: enough for its sinks and for what its next tokens depend on most.
NARROW_WINDOW = 256


def sheddable_parts(
    suffix: SuffixDrafter,
    new_table: Callable[[], NgramTable],
    caches: CachePool,
    model: CostlyDrafter | None,
    drafters: DrafterPool,
    pair: LoadedPair,
    plan: MemoryPlan,
) -> list[Sheddable]:
    """All there is to give up, in order.

    Args:
        suffix: the drafter with the table of n-grams.
        new_table: makes an empty one.
        caches: the target's caches.
        model: the drafter of the draft model or of the head; ``None`` if there is none.
        drafters: know what drafting with it is worth.
        pair: knows what calls of the target and loading the draft take.
        plan: knows how large its weights are.
    """
    places = {item.name: item.place for item in plan.items}
    parts = [
        ngram_table(suffix, new_table),
        replace(idle_conversations(caches), place=places["target KV cache"]),
    ]
    if model is None:
        return parts

    # Not the pair: it would keep the draft in memory.
    target, costs = pair.target, pair.calibration.costs

    def saved_seconds(tokens: int) -> float:
        past = target.cache.length
        return tokens * costs.verify(1, past) * drafters.worth_of_model(past)

    named = "head weights" if plan.configuration.head else "draft weights"
    weights = sum(item.bytes for item in plan.items if item.name == named)
    whole = draft_model(model, weights, pair.draft_load_seconds, saved_seconds)
    of_model = [head(whole, target, caches)] if plan.configuration.head else [draft_window(model), whole]
    return [*parts, *(replace(part, place=places[named]) for part in of_model)]


def ngram_table(suffix: SuffixDrafter, new_table: Callable[[], NgramTable]) -> Sheddable:
    """What the suffix drafter knows from other texts. It comes back empty."""
    size = 0 if suffix.table is None else suffix.table.memory_bytes

    def shed() -> None:
        suffix.table = None

    def admit() -> None:
        suffix.table = new_table()

    return Sheddable(
        "n-gram table",
        memory_bytes=lambda: 0 if suffix.table is None else size,
        shed=shed,
        cost_bytes=lambda: size if suffix.table is None else 0,
        admit=admit,
    )


def idle_conversations(caches: CachePool) -> Sheddable:
    """The caches of other conversations, which are read again when their turn comes."""
    return Sheddable("caches of idle conversations", lambda: caches.idle_bytes, caches.evict_idle)


def draft_window(model: CostlyDrafter) -> Sheddable:
    """What the draft's cache holds beyond a narrow window."""
    wide = model.window
    narrow = min(NARROW_WINDOW, wide)
    given_back = 0

    def shed() -> None:
        nonlocal given_back
        given_back = model.bytes_beyond(narrow)
        model.narrow(narrow)

    return Sheddable(
        "draft window",
        memory_bytes=lambda: model.bytes_beyond(narrow),
        shed=shed,
        cost_bytes=lambda: given_back if model.window < wide else 0,
        admit=lambda: model.narrow(wide),
    )


def draft_model(
    model: CostlyDrafter, weights_bytes: int, load_seconds: float, saved_seconds: Callable[[int], float]
) -> Sheddable:
    """The draft model with its cache.

    Args:
        model: its drafter.
        weights_bytes: what its weights take in memory.
        load_seconds: what loading it takes.
        saved_seconds: told how many tokens a text may still grow by, the seconds that the draft may then save.
    """
    return Sheddable(
        "draft model",
        memory_bytes=lambda: weights_bytes + model.memory_bytes if model.ready else 0,
        shed=model.unload,
        cost_bytes=lambda: 0 if model.ready else weights_bytes,
        admit=model.reload,
        pays=lambda tokens: saved_seconds(tokens) > load_seconds,
    )


def head(network: Sheddable, target: Model, caches: CachePool) -> Sheddable:
    """A head, and the hidden states that are kept for it. When it comes back, it reads what comes from then on.

    Args:
        network: the head itself, as :func:`draft_model` gives up whatever drafts.
        target: tells the hidden states.
        caches: hold them.
    """

    def shed() -> None:
        network.shed()
        target.keeps_taps = False
        caches.give_back_taps()

    def admit() -> None:
        network.admit()
        target.keeps_taps = True

    return replace(
        network,
        name="head",
        memory_bytes=lambda: network.memory_bytes() + caches.tap_bytes,  # which stay where the head itself has failed
        shed=shed,
        admit=admit,
    )
