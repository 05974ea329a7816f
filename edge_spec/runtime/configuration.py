"""How a pair is loaded: everything that decides how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_spec.manifest import CacheType, Device

# The most draft tokens of a round: with the text's last token they fill one prefill chunk.
WIDEST = 63

# Which drafter with a network of its own is wanted: the one that a plan prefers, one by name, or none.
DrafterChoice = Literal["auto", "head", "model", "none"]


@dataclass(frozen=True)
class Configuration:
    """What a memory plan decides.

    Attributes:
        context: most tokens of prompt and output together.
        conversations: how many texts of that length can be kept in the target's caches at once.
        widest: most draft tokens of a round.
        draft: whether the draft model is loaded.
        draft_device: what it runs on then; ``None`` without.
        draft_window: most tokens in the draft's cache.
        target_kv, draft_kv: how keys and values are stored.
        head: whether the head is loaded, which drafts from the target's hidden states; never beside the draft model.
    """

    context: int
    conversations: int
    widest: int
    draft: bool
    draft_device: Device | None
    draft_window: int
    target_kv: CacheType
    draft_kv: CacheType
    head: bool = False
