"""What kinds of tokens a GGUF file tells apart."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from tokenizers import AddedToken


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def added_tokens(tokens: Iterable[str], types: Iterable[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text as they are, before it is cut; control tokens are special."""
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    return added
