from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.gguf_file import GgufFile
from edge_spec.export.gguf_pretokenizers import PRE_TOKENIZERS
from edge_spec.export.gguf_tokenizer import read_vocabulary
from edge_spec.export.metadata import Metadata
from gguf_files import BYTE_TEXTS, CONTROL, UNUSED, USER_DEFINED, tokenizer_metadata

# Patterns in the form llama.cpp publishes them (src/llama-vocab.cpp), where what no pattern matches is a word as well.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Of the models' own tokenizer.json, or in Mistral's case tekken.json: llama.cpp's search knows no case of letters.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
GPT4O = TEKKEN.replace(r"\p{M}]+|", r"\p{M}]+" + ENDINGS + "|").replace(r"\p{M}]*|", r"\p{M}]*" + ENDINGS + "|")
PATTERNS = {
    "dbrx": [LLAMA3],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-r1-qwen": [QWEN2],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "gpt-4o": [GPT4O.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
    "llama-bpe": [LLAMA3],
    "llama-v3": [LLAMA3],
    "llama3": [LLAMA3],
    "qwen2": [QWEN2],
    "refact": [r"\p{N}", GPT2],
    "smaug-bpe": [LLAMA3],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "tekken": [TEKKEN],
}
COMPOSING, WHOLE_WORDS = ("qwen2", "deepseek-r1-qwen"), ("llama-bpe", "llama-v3", "llama3", "tekken")


class NaiveBpe:
    """Byte-level BPE as the GPT-2 paper describes it, as slow and as plain as can be; knows no special tokens."""

    def __init__(self, values: Metadata) -> None:
        self.ids = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
        merges = values.get("tokenizer.ggml.merges", [])
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.pre = values["tokenizer.ggml.pre"]

    def encode(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self.pre in COMPOSING else text]
        for pattern in PATTERNS[self.pre]:
            words = [piece for word in words for piece in split(pattern, word)]
        return [self.ids[token] for word in words for token in self.merge(word)]

    def merge(self, word: str) -> list[str]:
        parts = [BYTE_TEXTS[byte] for byte in word.encode()]
        if self.pre in WHOLE_WORDS and "".join(parts) in self.ids:
            return ["".join(parts)]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, len(self.ranks)), at) for at, pair in enumerate(pairwise(parts))]
            rank, at = min(ranked)
            if rank == len(self.ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


def split(pattern: str, text: str) -> Iterator[str]:
    position = 0
    for match in regex.finditer(pattern, text):
        if match.start() > position:
            yield text[position : match.start()]
        if match.group():
            yield match.group()
        position = match.end()
    if position < len(text):
        yield text[position:]


def read(**metadata: Any) -> Vocabulary:
    values = tokenizer_metadata(**metadata)
    return read_vocabulary(Metadata(values, "test.gguf"), len(values["tokenizer.ggml.tokens"]))


@pytest.fixture(scope="module", params=["smollm2", "qwen-target"])
def real_metadata(request: pytest.FixtureRequest, real_weights: Callable[[str], Path]) -> Metadata:
    return GgufFile(real_weights(request.param)).metadata


@pytest.fixture(scope="module")
def real(real_metadata: Metadata) -> tuple[Vocabulary, NaiveBpe]:
    return read_vocabulary(real_metadata, 151936), NaiveBpe(real_metadata)


@pytest.fixture(scope="module")
def qwen(real_weights: Callable[[str], Path]) -> Vocabulary:
    return read_vocabulary(GgufFile(real_weights("qwen-target")).metadata, 151936)


@pytest.fixture(scope="module")
def smollm(real_weights: Callable[[str], Path]) -> Vocabulary:
    return read_vocabulary(GgufFile(real_weights("smollm2")).metadata, 49152)


# From llama.cpp's models/ggml-vocab-qwen2.gguf.inp and .out, which transformers' tokenizer wrote, and from the
# published examples of Qwen2.5.
QWEN_IDS = {
    "Hello world": [9707, 1879],
    " Hello World!": [21927, 4337, 0],
    "Führer": [37, 50753, 261],
    "ied 4 ½ months": [1122, 220, 19, 220, 26062, 3951],
    "0123456789": [15, 16, 17, 18, 19, 20, 21, 22, 23, 24],
    "333333333": [18] * 9,
    "w048 7tuijk dsdfhu": [86, 15, 19, 23, 220, 22, 83, 1963, 41808, 11472, 2940, 16739],
    "\t\n": [1572],
    "\n\n\n": [1406],
    "    Hello\n    Hello": [262, 21927, 198, 262, 21927],
    "' era": [6, 11385],
    "нещо на Български": [78762, 14144, 1456, 13073, 63471, 33594, 3038, 133178, 79012],
    " this is 🦙.cpp": [419, 374, 11162, 99, 247, 13, 10821],
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ (only emoji that has its own token)": [
        *[145836, 320, 8252, 8, 26525, 114, 378, 235, 149921, 30543, 320, 35673, 99066, 97534, 8, 25521, 227, 320],
        *[3243, 42365, 429, 702, 1181, 1828, 3950, 8],
    ],
    "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～": [
        *[9707, 11, 379, 64848, 0, 2585, 525, 498, 26525, 223, 937, 104100, 18493, 22377, 99257],
        *[16, 18, 16, 19, 16, 20, 16, 35727, 21216],
    ],
    " I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL": [
        *[358, 3003, 1012, 364, 83, 813, 566, 594, 1052, 11, 364, 787, 498, 2704, 30, 364, 44, 537, 2704, 358],
        *[3278, 1281, 432, 11, 364, 35, 498, 1075, 1045, 15243, 30, 1205, 6, 42612, 264, 63866, 43],
    ],
    "<|im_start|>": [151644],
    "<|im_end|>\n": [151645, 198],
    "<|endoftext|>": [151643],
    "<tool_call>": [151657],
    "<|fim_prefix|>Hello<|fim_suffix|> world<|fim_middle|>": [151659, 9707, 151661, 1879, 151660],
}

# From public test suites of other programs, which recorded what the tokenizer.json of SmolLM2-135M-Instruct gives.
SMOLLM_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "12345 123 1 42 999": [33, 34, 35, 36, 37, 216, 33, 34, 35, 216, 33, 216, 36, 34, 216, 41, 41, 41],
    "math: 3.14159 >= 2^10": [8898, 42, 216, 35, 30, 33, 36, 33, 37, 41, 10888, 216, 34, 78, 33, 32],
    "snake_case and camelCase42": [48284, 79, 7544, 284, 32782, 10802, 36, 34],
    "DON'T don't Can't can't": [52, 2154, 23, 68, 1326, 982, 1978, 982, 416, 982],
    "I'm here; you're there.": [57, 5248, 1535, 43, 346, 2316, 665, 30],
    "  leading spaces": [216, 2899, 5600],
    "  spaced  text\n": [216, 23861, 216, 1694, 198],
    "Tabs\tspaces  and\nnewlines": [68, 7366, 197, 41123, 216, 284, 198, 2241, 5110],
    "CRLF\r\nline two": [9088, 60, 54, 201, 198, 1311, 827],
    "code: def foo(x): return x + 1": [4635, 42, 753, 29856, 24, 104, 727, 1003, 1792, 1232, 216, 33],
    "naïve café déjà vu": [3546, 46494, 37366, 32564, 90, 16739, 386, 101],
    "你好世界": [18645, 250, 48392, 138, 7906, 240, 178, 239, 230],
    "안녕하세요 세계": [
        *[183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238, 18601, 222, 133, 181, 128, 222],
    ],
    "emoji 😀😃 plus © and ™": [391, 33777, 40303, 218, 10813, 242, 221, 8055, 11435, 284, 4636, 222, 112],
    "<|im_start|>user\nHello, world! 2024\n<|im_end|>": [
        *[1, 4093, 198, 19556, 28, 905, 17, 216, 34, 32, 34, 36, 198, 2],
    ],
    "<|endoftext|>": [0],
}


@pytest.mark.parametrize("text", QWEN_IDS)
def test_qwen_gives_the_published_ids(qwen: Vocabulary, text: str) -> None:
    assert qwen.tokenizer.encode(text).ids == QWEN_IDS[text]
    assert qwen.tokenizer.decode(QWEN_IDS[text], skip_special_tokens=False) == text


@pytest.mark.parametrize("text", SMOLLM_IDS)
def test_smollm_gives_the_published_ids(smollm: Vocabulary, text: str) -> None:
    assert smollm.tokenizer.encode(text).ids == SMOLLM_IDS[text]
    assert smollm.tokenizer.decode(SMOLLM_IDS[text], skip_special_tokens=False) == text


def test_qwen_facts(qwen: Vocabulary) -> None:
    assert qwen.size == 151665  # of 151936 rows; the rest is padding
    assert qwen.tokenizer.get_vocab_size(with_added_tokens=True) == 151665
    assert qwen.eos_token_ids == (151643, 151645)
    assert qwen.bos_token_id == 151643
    assert qwen.named_tokens["eos_token"] == "<|im_end|>"
    # The tool-call markers are added tokens, but part of the text.
    assert set(range(151643, 151665)) - set(qwen.special_token_ids) == {151657, 151658}
    assert qwen.tokenizer.decode([151644, 9707, 151657, 151645]) == "Hello<tool_call>"
    assert qwen.chat_template is not None
    assert "<|im_start|>" in qwen.chat_template


def test_smollm_facts(smollm: Vocabulary) -> None:
    assert smollm.size == 49152
    assert smollm.special_token_ids == tuple(range(17))
    assert smollm.eos_token_ids == (0, 2)
    assert smollm.bos_token_id == 1
    assert smollm.named_tokens["bos_token"] == "<|im_start|>"
    assert smollm.chat_template is not None


def test_qwen_composes_characters(qwen: Vocabulary) -> None:
    assert qwen.tokenizer.encode("Fu\u0308hrer").ids == QWEN_IDS["Führer"]


SAMPLES = [
    "def f(x):\n\treturn {\n\t\t'key': [1, 22, 333],\n\t}  # it's 100%\r\n",
    "The year 2024—½ of it—cost $1,234.56; isn't that a lot? 'TIS WE'LL they'd",
    "日本語のテキスト、中文字符。한국어 텍스트 ١٢٣ ๑๒๓ Ⅷ ²",
    "👩\u200d👩\u200d👧\u200d👦 family, 🇩🇪 flag, 👍🏽 tone",
    "  two\u00a0spaces\u2003and \t mixed \n\n \n\t\n   ",
    'https://example.org/a_b?c=d&e=%20#f ==> <div class="x">&amp;</div>',
    "",
    " ",
    "\x00\x7f\ufeff\ufffd",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_real_vocabularies_agree_with_plain_bpe(real: tuple[Vocabulary, NaiveBpe], text: str) -> None:
    vocabulary, naive = real
    ids = vocabulary.tokenizer.encode(text).ids
    assert ids == naive.encode(text)
    assert vocabulary.tokenizer.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.sampled_from(["'s", "'LL", "'", "  ", "\t", "\r\n", "\n\n", " a", "Word", "12", "½", "...", "e\u0301"]),
            st.text(alphabet="abcXYZ019 \n\t'\"éßжש中あ한😀_-.,()", max_size=6),
        ),
        max_size=12,
    ).map("".join)
)
def test_any_text_agrees_with_plain_bpe_and_round_trips(real: tuple[Vocabulary, NaiveBpe], text: str) -> None:
    vocabulary, naive = real
    ids = vocabulary.tokenizer.encode(text).ids
    assert ids == naive.encode(text)
    expected = unicodedata.normalize("NFC", text) if naive.pre == "qwen2" else text
    assert vocabulary.tokenizer.decode(ids) == expected


# Merges under which every pre-tokenizer cuts differently: digits up to "1234", an exclamation mark after a word, and
# a word joined to the space or tab before it.
MERGES = ("1 2", "3 4", "12 34", "a b", "ab !", "Ġ ab", "ĉ ab", "! !", "12 3", "' s", "b A")


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("default", "1234", ["123", "4"]),
        ("gpt-2", "\tab", ["ĉ", "ab"]),
        ("qwen2", "\tab", ["ĉab"]),
        ("llama-bpe", "\tab", ["ĉab"]),
        ("gpt-2", " ab!!", ["Ġab", "!!"]),
        ("default", " ab!!", ["Ġab", "!!"]),
        ("smollm", " ab12", ["Ġab", "1", "2"]),
        ("refact", " ab12", ["Ġab", "1", "2"]),
        ("smaug-bpe", "1234", ["123", "4"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("deepseek-v3", "!ab", ["!", "ab"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("gpt-4o", "1234", ["123", "4"]),
        ("tekken", "abA", ["ab", "A"]),
    ],
)
def test_each_pre_tokenizer_cuts_in_its_own_way(pre: str, text: str, tokens: list[str]) -> None:
    vocabulary = read(pre=pre, merges=MERGES, add_bos_token=False)
    assert vocabulary.tokenizer.encode(text).tokens == tokens


def test_every_pre_tokenizer_is_held_to_published_patterns() -> None:
    assert PATTERNS.keys() == PRE_TOKENIZERS.keys()


@settings(max_examples=400, deadline=None)
@given(pre=st.sampled_from(sorted(PATTERNS)), text=st.text(alphabet="abA12345 \t\n!$/'sLlé\u0301½<中かǅ", max_size=24))
def test_every_pre_tokenizer_agrees_with_its_published_patterns(pre: str, text: str) -> None:
    metadata = tokenizer_metadata(pre, merges=MERGES, add_bos_token=False)
    values = Metadata(metadata, "test.gguf")
    vocabulary = read_vocabulary(values, len(metadata["tokenizer.ggml.tokens"]))
    assert vocabulary.tokenizer.encode(text).ids == NaiveBpe(values).encode(text)


def test_llama_takes_a_whole_word_that_no_merges_lead_to() -> None:
    metadata = tokenizer_metadata("llama-bpe", merges=("a b",), added={"abab": 1}, add_bos_token=False)
    vocabulary = read_vocabulary(Metadata(metadata, "test.gguf"), 300)
    assert vocabulary.tokenizer.encode("abab").tokens == ["abab"]
    assert vocabulary.tokenizer.encode("ababab").tokens == ["ab", "ab", "ab"]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    vocabulary = read(added={"<|end|>": CONTROL, "<think>": USER_DEFINED, "[gap]": UNUSED, "<|x|>": CONTROL}, padding=3)
    assert vocabulary.size == 260
    assert vocabulary.special_token_ids == (256, 259)
    ids = vocabulary.tokenizer.encode("<|end|><think>a<|x|>").ids
    assert ids == [256, 257, ord("a"), 259]
    assert vocabulary.tokenizer.decode(ids) == "<think>a"
    assert vocabulary.tokenizer.token_to_id("[PAD260]") is None


def test_padding_of_old_converters_is_told_by_its_text() -> None:
    metadata = tokenizer_metadata(padding=4)
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = [USER_DEFINED if type_ == UNUSED else type_ for type_ in types]
    assert read_vocabulary(Metadata(metadata, "test.gguf"), 300).size == 257


def test_bos_is_added_where_the_file_or_the_pre_tokenizer_says_so() -> None:
    assert read(bos_token_id=256, add_bos_token=True).tokenizer.encode("a").ids == [256, ord("a")]
    assert read(bos_token_id=256, add_bos_token=True).tokenizer.encode("a", add_special_tokens=False).ids == [ord("a")]
    assert read(bos_token_id=256).tokenizer.encode("a").ids == [ord("a")]
    assert read(pre="llama-bpe", bos_token_id=256).tokenizer.encode("a").ids == [256, ord("a")]
    with pytest.raises(CheckpointError, match="BOS"):
        read(add_bos_token=True)


def test_every_way_to_end_a_turn_is_an_eos_token() -> None:
    added = {"<s>": CONTROL, "<|eot_id|>": CONTROL, "<stop>": CONTROL, "<call>": CONTROL, "<|im_end|>": USER_DEFINED}
    vocabulary = read(added=added, eos_token_id=256, eot_token_id=258, eom_token_id=259)
    assert vocabulary.eos_token_ids == (256, 257, 258, 259, 260)


def test_a_chat_template_is_carried_over() -> None:
    metadata = {**tokenizer_metadata(), "tokenizer.chat_template": "{{ messages }}"}
    assert read_vocabulary(Metadata(metadata, "test.gguf"), 300).chat_template == "{{ messages }}"
    assert read().chat_template is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.pre": "chameleon"}, "'chameleon'.*"),
        ({"tokenizer.ggml.pre": None}, "names no pre-tokenizer"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
    ],
)
def test_an_unknown_tokenizer_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        read_vocabulary(Metadata({**tokenizer_metadata(), **changes}, "test.gguf"), 300)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.model": None}, "lacks 'tokenizer.ggml.model'"),
        ({"tokenizer.ggml.tokens": None}, "equally long"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "equally long"),
        ({"tokenizer.ggml.tokens": ["a"] * 257}, "different strings"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["a z z"]}, "'a z z'"),
        ({"tokenizer.ggml.merges": ["az"]}, "'az'"),
        ({"tokenizer.ggml.eos_token_id": 257}, "eos_token_id is 257"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_contradictory_metadata_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        read_vocabulary(Metadata({**tokenizer_metadata(), **changes}, "test.gguf"), 300)


def test_more_tokens_than_embedding_rows_are_refused() -> None:
    with pytest.raises(CheckpointError, match="257 tokens.*256 rows"):
        read_vocabulary(Metadata(tokenizer_metadata(), "test.gguf"), 256)
