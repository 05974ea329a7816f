"""The tokenizer of a GGUF file, rebuilt as a ``tokenizers.Tokenizer`` that gives the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

from tokenizers import Tokenizer, processors

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.gguf_bpe import build_bpe, find_pre_tokenizer
from edge_spec.export.gguf_sentencepiece import build_sentencepiece, user_defined_as_found
from edge_spec.export.gguf_token_types import TokenType
from edge_spec.export.metadata import Metadata
from edge_spec.tokenizer_check import panics_as_errors, reason

_Item = TypeVar("_Item")

# Tokens that end a turn by convention, whatever the metadata calls the end of a text, and whatever their type.
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")

_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "eot_token": "tokenizer.ggml.eot_token_id",
    "eom_token": "tokenizer.ggml.eom_token_id",
}
_TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# What SentencePiece vocabularies have where the file names none.
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}


def read_vocabulary(values: Metadata, embedding_rows: int) -> Vocabulary:
    """Rebuild the tokenizer and everything that belongs to it.

    Args:
        values: the metadata of a GGUF file.
        embedding_rows: rows of the model's embedding; no token id may reach it.

    Raises:
        UnsupportedError: the tokenizer is neither byte-level BPE nor SentencePiece BPE, or it treats text in an
            unknown way.
        CheckpointError: the metadata is incomplete or contradicts itself.
    """
    kind = values.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{values.where}: tokenizer model {kind!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)"
        )
    is_sentencepiece = kind == "llama"
    # A name that nobody knows is told first: the rest may not be understood either.
    adds_bos = is_sentencepiece or find_pre_tokenizer(values).adds_bos
    tokens, types = _read_tokens(values, embedding_rows)
    if is_sentencepiece:
        tokens = user_defined_as_found(values, tokens, types)
    special = {name: _token_id(values, key, tokens) for name, key in _SPECIAL_KEYS.items()}
    if is_sentencepiece:
        defaults = {name: index for name, index in _SENTENCEPIECE_IDS.items() if index < len(tokens)}
        special = {name: defaults.get(name) if index is None else index for name, index in special.items()}
    tokenizer = _build(values, is_sentencepiece, tokens, types)
    bos = special["bos_token"]
    if values.flag("tokenizer.ggml.add_bos_token", adds_bos):
        if bos is None:
            raise CheckpointError(f"{values.where}: texts start with a BOS token, but no usable one is named")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{tokens[bos]}:0", "$A:0"],
            pair=[f"{tokens[bos]}:0", "$A:0", f"{tokens[bos]}:1", "$B:1"],
            special_tokens=[(tokens[bos], bos)],
        )
    ends = {index for index, token in enumerate(tokens) if token in _TURN_ENDS}
    ends |= {index for index in (special["eos_token"], special["eot_token"], special["eom_token"]) if index is not None}
    return Vocabulary(
        tokenizer=tokenizer,
        size=len(tokens),
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=bos,
        special_token_ids=tuple(
            index for index, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
        ),
        chat_template=values.text("tokenizer.chat_template") if "tokenizer.chat_template" in values else None,
        named_tokens={
            name: tokens[index] for name, index in special.items() if index is not None and name in _TEMPLATE_NAMES
        },
    )


def _build(values: Metadata, is_sentencepiece: bool, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    try:
        with panics_as_errors():
            return (build_sentencepiece if is_sentencepiece else build_bpe)(values, tokens, types)
    except (CheckpointError, UnsupportedError):
        raise
    except Exception as error:  # the package raises nothing more specific
        raise CheckpointError(f"{values.where}: its tokens and merges are no tokenizer ({reason(error)})") from error


def _read_tokens(values: Metadata, embedding_rows: int) -> tuple[list[str], list[int]]:
    """Return the text and type of every usable token; padding at the end is left out."""
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if not _is_list_of(tokens, str) or not _is_list_of(types, int) or len(tokens) != len(types):
        raise CheckpointError(
            f"{values.where}: tokenizer.ggml.tokens and tokenizer.ggml.token_type must be equally long lists of "
            "strings and of integers; convert the model again with a current llama.cpp"
        )
    if len(tokens) > embedding_rows:
        raise CheckpointError(f"{values.where}: {len(tokens)} tokens, but the embedding has only {embedding_rows} rows")
    size = len(tokens)
    # Old converters marked the padding only by its text.
    while size and (types[size - 1] == TokenType.UNUSED or tokens[size - 1] == f"[PAD{size - 1}]"):
        size -= 1
    tokens = tokens[:size]
    types = [TokenType.CONTROL if token in _TURN_ENDS else kind for token, kind in zip(tokens, types, strict=False)]
    if not tokens or len(set(tokens)) != size:
        raise CheckpointError(f"{values.where}: the tokens are not {size or 'some'} different strings")
    return tokens, types


def _token_id(values: Metadata, key: str, tokens: Sequence[str]) -> int | None:
    if key not in values:
        return None
    index = values.integer(key, minimum=0)
    if index < len(tokens):
        return index
    if key in (_SPECIAL_KEYS["unk_token"], _SPECIAL_KEYS["pad_token"]):  # nothing here depends on these
        return None
    raise CheckpointError(f"{values.where}: {key} is {index}, but the last usable token has id {len(tokens) - 1}")


def _is_list_of(value: object, kind: type[_Item]) -> TypeGuard[list[_Item]]:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
