"""The drafter for a pair's draft model, by how that model speaks, or for its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from edge_spec.manifest import Manifest
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.calibration import TEXT
from edge_spec.runtime.drafters.block import BlockDrafter
from edge_spec.runtime.drafters.head import HeadDrafter
from edge_spec.runtime.drafters.medusa import MedusaDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import CostlyDrafter
from edge_spec.runtime.drafters.reencoded import ReencodedDrafter
from edge_spec.runtime.drafters.reencoded_text import ReencodedText
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.loaded_pair import LoadedPair
from edge_spec.runtime.medusa_heads import MedusaHeads


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
    if isinstance(pair.head, MedusaHeads):
        heads_again = cast("Callable[[], MedusaHeads] | None", pair.load_head)
        return MedusaDrafter(pair.head, pair.target, on_call, clock, heads_again, pair.draft_vocabulary)
    if isinstance(pair.head, BlockHead):
        block_again = cast("Callable[[], BlockHead] | None", pair.load_head)
        return BlockDrafter(pair.head, pair.target, None, on_call, clock, block_again)
    if pair.head is not None:
        head_again = cast("Callable[[], HeadModel] | None", pair.load_head)
        return HeadDrafter(pair.head, pair.target, None, on_call, clock, head_again, vocabulary=pair.draft_vocabulary)
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
