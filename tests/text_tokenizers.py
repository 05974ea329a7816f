"""Tokenizers as the runtime loads them, for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edge_spec.runtime.tokenizer import TextTokenizer


def loaded(tokenizer: Tokenizer) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        tokenizer.save(str(path))
        return TextTokenizer(path)


def byte_pairs(merges: Sequence[tuple[str, str]], specials: Sequence[str] = (), digits: bool = False) -> Tokenizer:
    """A byte-level BPE with these merges, the ids in an order of its own; with ``digits``, one number is many words."""
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=len(merges) % 2 == 1)]
    texts += dict.fromkeys(left + right for left, right in merges)
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=list(merges)))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = [pre_tokenizers.Digits(individual_digits=True), words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split) if digits else words
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer


def sentence_pieces(merges: Sequence[tuple[str, str]], specials: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer in the manner of SentencePiece: a mark for a space, one in front of every text, bytes as fallback."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    texts += [text for text in dict.fromkeys(left + right for left, right in merges) if text not in texts]
    model = models.BPE(
        vocab={text: index for index, text in enumerate(texts)},
        merges=list(merges),
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer
