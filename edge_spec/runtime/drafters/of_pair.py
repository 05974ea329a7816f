"""The drafter for a pair's draft model, by how that model speaks, or for its head."""

from __future__ import annotations

from collections.abc import Callable

from edge_spec.manifest import Manifest
from edge_spec.runtime.calibration import TEXT
from edge_spec.runtime.drafters.head import HeadDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import CostlyDrafter
from edge_spec.runtime.drafters.reencoded import ReencodedDrafter
from edge_spec.runtime.drafters.reencoded_text import ReencodedText
from edge_spec.runtime.loaded_pair import LoadedPair


def drafter_of_pair(
    pair: LoadedPair,
    manifest: Manifest,
    window: int,
    on_call: Callable[..., None],
    clock: Callable[[], float],
) -> CostlyDrafter | None:
    """Draft with the head or the draft model of a pair; ``None`` if it has neither.

    Args:
        pair: as loaded; its draft or head then belongs to the drafter.
        manifest: what the bundle says of itself.
        window: most tokens in the draft's cache.
        on_call: told rows, cached tokens and seconds of every call of the model, and the tokens that it drafted if
            there were several.
        clock: tells the time, in seconds.
    """
    if pair.head is not None:
        return HeadDrafter(
            pair.head, pair.target, None, on_call, clock, pair.load_head, vocabulary=pair.draft_vocabulary
        )
    if pair.draft is None:
        return None
    speech = manifest.draft_vocabulary
    if pair.draft_tokenizer is None or speech is None:
        chain_step = pair.calibration.costs.chain_step
        return ModelDrafter(pair.draft, window, on_call, clock, pair.load_draft, pair.draft_vocabulary, chain_step)
    text = ReencodedText(pair.tokenizer, pair.draft_tokenizer, manifest.vocab_size, speech.size)
    return ReencodedDrafter(
        pair.draft,
        text,
        text.steps_per_token(TEXT),
        window=window,
        on_call=on_call,
        clock=clock,
        load=pair.load_draft,
        vocabulary=pair.draft_vocabulary,
    )
