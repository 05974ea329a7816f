"""What each token adds to a text, as bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import byte_pairs, loaded, sentence_pieces

from edge_spec.errors import RequestError

BYTE_LEVEL = loaded(byte_pairs([("a", "b"), ("ab", "c"), ("Ġ", "a")], specials=("<|end|>",)))
PIECES = loaded(sentence_pieces([("▁", "a"), ("b", "c")], specials=("</s>",)))


@given(st.text())
def test_bytes_of_a_text_are_those_of_its_tokens(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(st.text(alphabet="abc zß漢"))
def test_bytes_of_a_text_in_the_manner_of_sentencepiece_follow_its_first_space(text: str) -> None:
    ids = PIECES.encode(text, add_special_tokens=False)
    assert b"".join(map(PIECES.token_bytes, ids)).decode().removeprefix(" ") == text.removeprefix(" ")


def test_special_tokens_are_written_out_and_unknown_ids_are_nothing() -> None:
    (end,) = BYTE_LEVEL.encode("<|end|>", add_special_tokens=False)
    assert BYTE_LEVEL.token_bytes(end) == b"<|end|>"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""


@pytest.mark.parametrize("token_id", [-1, 1 << 32, "7"])
def test_what_is_no_id_is_refused(token_id: Any) -> None:
    with pytest.raises(RequestError, match="must be integers"):
        PIECES.token_bytes(token_id)
