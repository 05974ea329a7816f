"""A SentencePiece BPE vocabulary of a GGUF file as a ``tokenizers.Tokenizer`` that gives the same ids.

SentencePiece (Kudo and Richardson 2018) keeps no merges: of all neighbours that together are a piece, it joins those
whose piece has the highest score, the leftmost first. What is in no piece is written as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.gguf_token_types import TokenType, added_tokens
from edge_spec.export.metadata import Metadata

SPACE = "\u2581"  # what stands for a space in a piece
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Far above any vocabulary: characters of one piece, and pairs of pieces that are a piece.
_LONGEST_PIECE = 256
_MOST_MERGES = 1 << 22

# Tokens of Phi-3 that do not swallow the whitespace behind them, as its others do. Nothing in the file tells.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def build_sentencepiece(values: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Build the tokenizer.

    Args:
        values: the metadata of a GGUF file, for the scores and for how spaces are treated.
        tokens: the text of each token.
        types: the :class:`TokenType` of each token.

    Raises:
        UnsupportedError: text is normalized before it is cut.
        CheckpointError: the scores do not fit the tokens, or some bytes have no token.
    """
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if values.get(key):
            raise UnsupportedError(f"{values.where}: {key} is set; tokenizers that normalize text are not supported")
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens) or not all(map(_is_score, scores)):
        raise CheckpointError(
            f"{values.where}: tokenizer.ggml.scores must be a list of a number for each of {len(tokens)} tokens; "
            "convert the model again with a current llama.cpp"
        )
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    falls_back = {text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.BYTE} >= _BYTES
    if unknown is None and not falls_back:
        raise CheckpointError(f"{values.where}: its tokens have neither all bytes nor one for what is unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(values, tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=falls_back,
        )
    )
    begins_with_space = _begins_with_space(values)
    marks_spaces = normalizers.Replace(" ", SPACE)
    unmarks_spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), marks_spaces])
        tokenizer.decoder = decoders.Sequence([*unmarks_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = marks_spaces
        tokenizer.decoder = decoders.Sequence(unmarks_spaces)
    swallows = values.get("general.architecture") == "phi3"
    tokenizer.add_tokens([_adapted(token, swallows, begins_with_space) for token in added_tokens(tokens, types)])
    return tokenizer


def user_defined_as_found(values: Metadata, tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Write the spaces of user-defined tokens as the text has them where the tokenizer looks for them.

    Converters of different ages write them either way. The tokenizer looks in the text as it is if a space is put in
    front of it, and otherwise in the text with its spaces marked, where it also finds a mark that was written out.
    """
    old, new = (SPACE, " ") if _begins_with_space(values) else (" ", SPACE)
    known = set(tokens)
    return [
        changed if kind == TokenType.USER_DEFINED and (changed := token.replace(old, new)) not in known else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _begins_with_space(values: Metadata) -> bool:
    return values.flag("tokenizer.ggml.add_space_prefix", True)


def _merges(
    values: Metadata, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every pair of pieces that is a piece, best first; where several pairs are one piece, long left sides."""
    normal = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=False) if kind == TokenType.NORMAL
    }
    ranked = []
    for token, score in normal.items():
        if len(token) > _LONGEST_PIECE:
            raise CheckpointError(f"{values.where}: a piece has {len(token)} characters, expected {_LONGEST_PIECE}")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-score, -cut, -len(right), left, right))
        if len(ranked) > _MOST_MERGES:
            raise CheckpointError(f"{values.where}: its pieces are made of others in more than {_MOST_MERGES} ways")
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _is_score(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _adapted(token: AddedToken, swallows_space: bool, begins_with_space: bool) -> AddedToken:
    """Return a token that is found in a text where SentencePiece finds it."""
    return AddedToken(
        token.content,
        special=token.special,
        rstrip=swallows_space and token.content not in _PHI3_KEEPS_SPACE,
        # Normalized like the text, a token would get the space that is put in front of that.
        normalized=not token.special and not begins_with_space,
    )
