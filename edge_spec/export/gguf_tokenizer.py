"""The tokenizer of a GGUF file, rebuilt as a ``tokenizers.Tokenizer`` that gives the same ids.

A GGUF file holds the vocabulary and merges of a byte-level BPE tokenizer, but of its pre-tokenizer only a name. What
each name stands for is written down in llama.cpp (``src/llama-vocab.cpp``) and in the ``tokenizer.json`` of the models
it was introduced for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeGuard, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.metadata import Metadata
from edge_spec.tokenizer_check import panics_as_errors, reason

_Item = TypeVar("_Item")

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The pattern of tiktoken's cl100k_base; models differ in how many digits form one word.
_CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Tokens that end a turn by convention, whatever the metadata calls the end of a text.
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


@dataclass(frozen=True)
class PreTokenizer:
    """What one value of ``tokenizer.ggml.pre`` stands for.

    Attributes:
        patterns: regular expressions applied one after the other, each splitting the words the last one left.
        nfc: whether text is first normalized to NFC.
        ignore_merges: whether a word that is a token is taken whole, even if no merges lead to it.
        adds_bos: whether a text starts with the BOS token when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2_WORDS,)),
    "llama-bpe": PreTokenizer((_CL100K_WORDS % r"\p{N}{1,3}",), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizer((_CL100K_WORDS % r"\p{N}",), nfc=True),
    "smollm": PreTokenizer((r"\p{N}", _GPT2_WORDS)),
}


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_vocabulary(values: Metadata, embedding_rows: int) -> Vocabulary:
    """Rebuild the tokenizer and everything that belongs to it.

    Args:
        values: the metadata of a GGUF file.
        embedding_rows: rows of the model's embedding; no token id may reach it.

    Raises:
        UnsupportedError: the tokenizer is no byte-level BPE, or its pre-tokenizer is unknown.
        CheckpointError: the metadata is incomplete or contradicts itself.
    """
    kind = values.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(f"{values.where}: tokenizer model {kind!r} is not supported; supported is gpt2 (BPE)")
    pre_tokenizer = _find_pre_tokenizer(values)
    tokens, types = _read_tokens(values, embedding_rows)
    special = {name: _token_id(values, key, tokens) for name, key in _SPECIAL_KEYS.items()}
    bos = special["bos_token"]
    try:
        with panics_as_errors():
            tokenizer = _build(values, pre_tokenizer, tokens, types)
    except CheckpointError:
        raise
    except Exception as error:  # the package raises nothing more specific
        raise CheckpointError(f"{values.where}: its tokens and merges are no tokenizer ({reason(error)})") from error
    if values.flag("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos):
        if bos is None:
            raise CheckpointError(f"{values.where}: texts start with a BOS token, but no usable one is named")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{tokens[bos]}:0", "$A:0"],
            pair=[f"{tokens[bos]}:0", "$A:0", f"{tokens[bos]}:1", "$B:1"],
            special_tokens=[(tokens[bos], bos)],
        )
    control = [index for index, type_ in enumerate(types) if type_ in (TokenType.CONTROL, TokenType.UNKNOWN)]
    ends = {index for index in control if tokens[index] in _TURN_ENDS}
    ends |= {index for index in (special["eos_token"], special["eot_token"], special["eom_token"]) if index is not None}
    return Vocabulary(
        tokenizer=tokenizer,
        size=len(tokens),
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=bos,
        special_token_ids=tuple(control),
        chat_template=values.text("tokenizer.chat_template") if "tokenizer.chat_template" in values else None,
        named_tokens={
            name: tokens[index] for name, index in special.items() if index is not None and name in _TEMPLATE_NAMES
        },
    )


def _find_pre_tokenizer(values: Metadata) -> PreTokenizer:
    name = values.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        given = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}, which is not supported"
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(
            f"{values.where} {given}; supported are {known}. With a wrong one the model would read garbled text: "
            "convert the model again with a current llama.cpp, or use its Hugging Face checkpoint"
        )
    return PRE_TOKENIZERS[name]


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
    tokens, types = tokens[:size], types[:size]
    if not tokens or len(set(tokens)) != size:
        raise CheckpointError(f"{values.where}: the tokens are not {size or 'some'} different strings")
    return tokens, types


def _build(values: Metadata, kind: PreTokenizer, tokens: Sequence[str], types: Iterable[int]) -> Tokenizer:
    merges = values.get("tokenizer.ggml.merges")
    if not _is_list_of(merges, str):
        raise CheckpointError(f"{values.where} lacks a list of merges (tokenizer.ggml.merges)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"{values.where}: merge {merge!r} does not join two tokens into a third")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    added = []
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (TokenType.CONTROL, TokenType.UNKNOWN):
            added.append(AddedToken(token, special=True, normalized=False))
        elif type_ == TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_tokens(added)
    return tokenizer


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
