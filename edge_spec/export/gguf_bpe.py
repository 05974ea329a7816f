"""A byte-level BPE vocabulary of a GGUF file as a ``tokenizers.Tokenizer`` that gives the same ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from edge_spec.export.gguf_token_types import added_tokens
from edge_spec.export.metadata import Metadata


def find_pre_tokenizer(values: Metadata) -> PreTokenizer:
    """Return what ``tokenizer.ggml.pre`` stands for. Raises UnsupportedError if that is unknown."""
    name = values.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        given = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}, which is not supported"
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(
            f"{values.where} {given}; supported are {known}. With a wrong one the model would read garbled text: "
            "convert the model again with a current llama.cpp, or use its Hugging Face checkpoint"
        )
    return PRE_TOKENIZERS[name]


def build_bpe(values: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Build the tokenizer.

    Args:
        values: the metadata of a GGUF file, for the merges and the pre-tokenizer.
        tokens: the text of each token.
        types: the :class:`~edge_spec.export.gguf_token_types.TokenType` of each token.

    Raises:
        UnsupportedError: the pre-tokenizer is unknown.
        CheckpointError: the merges do not fit the tokens.
    """
    kind = find_pre_tokenizer(values)
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
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
    tokenizer.add_tokens(added_tokens(tokens, types))
    return tokenizer
