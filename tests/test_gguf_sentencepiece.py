"""SentencePiece vocabularies of GGUF files, against SentencePiece's own procedure written out plainly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.export.gguf_tokenizer import read_vocabulary
from edge_spec.export.metadata import Metadata
from gguf_files import CONTROL, NORMAL, UNUSED, USER_DEFINED

UNKNOWN, BYTE = 2, 6
SPACE = "\u2581"
# Best first, each made of two others, as training leaves them.
JOINED = (
    *(f"{SPACE}t", "he", "in", "er", f"{SPACE}a", f"{SPACE}the", "on", f"{SPACE}th", "re", "th", "the", "ing"),
    *("er" + "s", f"{SPACE}in", "an", "and", f"{SPACE}and", SPACE * 2, SPACE * 4, "there", "!" * 2),
)
LETTERS = (SPACE, *"etaoinhrsgd!", "é", "日")


def metadata(added: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary in the order of Llama 2's: controls, bytes, pieces, letters, added tokens."""
    added = added or {}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *JOINED, *LETTERS, *added]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(JOINED + LETTERS), *added.values()]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(JOINED + LETTERS))] + [-1000.0] * len(added)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def read(values: dict[str, Any]) -> Vocabulary:
    return read_vocabulary(Metadata(values, "test.gguf"), len(values["tokenizer.ggml.tokens"]))


def encode(vocabulary: Vocabulary, text: str) -> list[str | None]:
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return [vocabulary.tokenizer.id_to_token(index) for index in ids]


def plainly(text: str, prefix: bool) -> list[str]:
    """Join the best-scored neighbours, the leftmost of equals, until none are a piece; what is no piece is bytes."""
    ranks = {piece: rank for rank, piece in enumerate(JOINED + LETTERS)}
    parts = list((SPACE if prefix and text else "") + text.replace(" ", SPACE))
    while True:
        pairs = [left + right for left, right in pairwise(parts)]
        best = min((pair for pair in pairs if pair in ranks), key=ranks.__getitem__, default=None)
        if best is None:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [best]
    return [
        token
        for part in parts
        for token in ([part] if part in ranks else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


TEXTS = st.lists(
    st.sampled_from(
        [" ", "  ", "the", "there", "and", "in", "ing", "ers", "on", "!", "!!!", "\n", "é", "ü", "日", "😀"]
    )
    | st.text(alphabet="etaoinhrsgd! ", max_size=6),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_any_text_is_cut_as_sentencepiece_cuts_it_and_comes_back(prefix: bool, text: str) -> None:
    vocabulary = _VOCABULARIES[prefix]
    assert encode(vocabulary, text) == plainly(text, prefix)
    assert vocabulary.tokenizer.decode(vocabulary.tokenizer.encode(text).ids) == text


_VOCABULARIES = {prefix: read(metadata(add_space_prefix=prefix)) for prefix in (True, False)}


def test_the_ids_llama_2_gives_by_default() -> None:
    vocabulary = read(metadata())
    assert (vocabulary.bos_token_id, vocabulary.eos_token_ids) == (1, (2,))
    assert vocabulary.special_token_ids == (0, 1, 2)
    assert vocabulary.tokenizer.encode("the").tokens == ["<s>", f"{SPACE}the"]
    assert vocabulary.named_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert read(metadata(add_bos_token=False)).tokenizer.encode("the").tokens == [f"{SPACE}the"]


def test_text_behind_a_control_token_begins_with_a_space_as_well() -> None:
    assert encode(read(metadata()), "the</s>the") == [f"{SPACE}the", "</s>", f"{SPACE}the"]
    assert encode(_VOCABULARIES[False], "the</s>the") == ["the", "</s>", "the"]


def test_runs_that_are_tokens_are_found_before_anything_is_joined() -> None:
    added = {"   ": USER_DEFINED, "\n": USER_DEFINED, "\n\n": USER_DEFINED}
    vocabulary = read(metadata(added, add_space_prefix=False))
    assert encode(vocabulary, "the    the") == ["the", SPACE * 3, f"{SPACE}the"]
    assert encode(vocabulary, "the\n\n\nthe") == ["the", "\n\n", "\n", "the"]
    assert vocabulary.tokenizer.decode(vocabulary.tokenizer.encode("the   the\n\n").ids) == "the   the\n\n"
    assert encode(vocabulary, f"the {SPACE} the") == ["the", SPACE * 3, "the"]  # a mark is a space


@pytest.mark.parametrize("run", [SPACE * 3, "   "])
def test_converters_of_every_age_write_the_same_tokenizer(run: str) -> None:
    """As in tokenizer.json, so that a GGUF file and a Hugging Face checkpoint make a pair."""
    vocabulary = read(metadata({run: USER_DEFINED}, add_space_prefix=False))
    assert encode(vocabulary, "the   the") == ["the", SPACE * 3, "the"]
    assert SPACE * 3 in vocabulary.tokenizer.get_vocab()
    with_prefix = read(metadata({f"{run}!": USER_DEFINED}))
    assert encode(with_prefix, "the   !the") == [f"{SPACE}the", "   !", f"{SPACE}the"]


@pytest.mark.parametrize(
    ("architecture", "tokens"),
    [("phi3", ["<|user|>", f"{SPACE}the", "<|end|>", "<|endoftext|>", SPACE, "<0x0A>"]), ("llama", None)],
)
def test_the_tokens_of_phi3_swallow_the_whitespace_behind_them(architecture: str, tokens: list[str] | None) -> None:
    added = {"<|user|>": CONTROL, "<|end|>": CONTROL, "<|endoftext|>": CONTROL}
    vocabulary = read({**metadata(added), "general.architecture": architecture})
    found = encode(vocabulary, "<|user|>\nthe<|end|>\n<|endoftext|>\n")
    assert found == tokens or (tokens is None and found.count("<0x0A>") == 3)


def test_a_token_that_ends_turns_is_a_control_token_whatever_its_type() -> None:
    vocabulary = read(metadata({"<end_of_turn>": USER_DEFINED, "<unused0>": UNUSED, "<table>": USER_DEFINED}))
    end = vocabulary.tokenizer.token_to_id("<end_of_turn>")
    assert vocabulary.eos_token_ids == (2, end)
    assert end in vocabulary.special_token_ids
    assert vocabulary.tokenizer.decode([end, end + 2]) == "<table>"


def test_pieces_of_other_types_are_never_joined_to() -> None:
    assert encode(read(metadata({"tha": UNUSED, "<x>": CONTROL})), "tha") == [f"{SPACE}th", "a"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": [float("nan")] * 400}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": ["0"] * 400}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": [NORMAL] * len(metadata()["tokenizer.ggml.tokens"])}, "neither all bytes"),
        ({"tokenizer.ggml.bos_token_id": 4000}, "bos_token_id is 4000"),
    ],
)
def test_contradictory_metadata_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        read({**metadata(), **changes})


def test_an_endless_piece_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a piece has 300 characters"):
        read(metadata({"a" * 300: NORMAL}))


@pytest.mark.parametrize("key", ["remove_extra_whitespaces", "precompiled_charsmap"])
def test_tokenizers_that_rewrite_the_text_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        read(metadata(**{key: [1, 2] if key.endswith("map") else True}))
