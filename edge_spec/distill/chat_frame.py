"""What a chat template puts around what a user says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from edge_spec.errors import RequestError

# What no tokenizer joins with what stands beside it in the same way.
_SAID = ("a", "7", "?")


@dataclass(frozen=True)
class ChatFrame:
    """Token ids before and behind a user's first message, up to where the answer begins."""

    before: tuple[int, ...]
    behind: tuple[int, ...]


def chat_frame(encode: Callable[[Any], Sequence[int]]) -> ChatFrame:
    """Find what is the same whatever the user says.

    Args:
        encode: gives the token ids of messages.

    Raises:
        RequestError: there is no template, or it puts nothing before or behind a message.
    """
    texts = [list(encode([{"role": "user", "content": said}])) for said in _SAID]
    before = _common(texts)
    behind = _common([text[len(before) :][::-1] for text in texts])[::-1]
    for part, place, lost in ((before, "before", "begins"), (behind, "behind", "ends")):
        if not part:
            raise RequestError(f"The chat template puts nothing {place} a message, so nobody can tell where it {lost}.")
    return ChatFrame(before, behind)


def _common(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What all of them begin with."""
    columns = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    return tuple(tokens[0] for tokens in columns)
