"""How byte-level BPE tokenizers cut a text into words, of which a GGUF file holds but a name.

What each name stands for is written down in llama.cpp (``src/llama-vocab.cpp``) and in the ``tokenizer.json`` of the
models it was introduced for; where llama.cpp can only approximate an expression, it is the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The pattern of tiktoken's cl100k_base; models differ in how many digits form one word.
_CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pattern of tiktoken's o200k_base; models differ in the endings of English words, and again in the digits.
_O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENGLISH_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


_CL100K = (_CL100K_WORDS % r"\p{N}{1,3}",)
_LLAMA3 = PreTokenizer(_CL100K, ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_CL100K_WORDS % r"\p{N}",), nfc=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_WORDS))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "dbrx": PreTokenizer(_CL100K),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2_WORDS,)),
    "gpt-4o": PreTokenizer((_O200K_WORDS % (_ENGLISH_ENDINGS, _ENGLISH_ENDINGS, r"\p{N}{1,3}"),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smaug-bpe": PreTokenizer(_CL100K),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": PreTokenizer((_O200K_WORDS % ("", "", r"\p{N}"),), ignore_merges=True, adds_bos=True),
}
