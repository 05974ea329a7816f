"""Streaming gives the text that decoding everything at once would have given, and never takes a piece back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edge_spec.errors import BundleError, RequestError
from edge_spec.runtime.text_stream import TextStream
from edge_spec.runtime.tokenizer import TextTokenizer

TRAINING_TEXT = [
    "hello world, hello there",
    "don't stop: STOP",
    "你好，世界",
    "naïve café 🙂🙃",
    "\tdef f(x):\n\t\treturn x",
]


def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3, Qwen, SmolLM: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_tokens(["<tool>"])  # added, but part of the text
    return tokenizer


def sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    """As in Llama 2, TinyLlama, Mistral: words with a leading mark, and single bytes for whatever is missing."""
    pieces = ["▁", "▁▁", "▁hello", "▁world", "hel", "lo", "STOP", "ST", "OP", ".", "好", "\ufffd", ""]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return tokenizer


@cache
def library_tokenizer(kind: str) -> Tokenizer:
    if kind == "byte level":
        return byte_level()
    if kind == "sentence piece":
        strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        return sentence_piece(decoders.Sequence(strip))
    return sentence_piece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@cache
def tokenizer_of_kind(kind: str) -> TextTokenizer:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        library_tokenizer(kind).save(str(path))
        return TextTokenizer(path)


def token_id(kind: str, token: str) -> int:
    found = library_tokenizer(kind).token_to_id(token)
    assert found is not None
    return found


KINDS = ["byte level", "sentence piece", "metaspace"]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, the longest of those complete at once."""
    for end in range(len(text) + 1):
        complete = [len(string) for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(complete)]
    return text


def unknown(tokenizer: TextTokenizer) -> int:
    return tokenizer.vocab_size + 5


@st.composite
def streams(draw: st.DrawFn) -> tuple[TextTokenizer, list[int], tuple[str, ...]]:
    """Real text, cut anywhere and mixed with random tokens; stop strings taken from it or made up."""
    tokenizer = tokenizer_of_kind(draw(st.sampled_from(KINDS)))
    piece = st.one_of(
        st.sampled_from([*TRAINING_TEXT, "🙂", "\ufffd", "STOP", "  "]).map(lambda text: tokenizer.encode(text)),
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6),
        st.tuples(st.sampled_from("你🙂é"), st.integers(1, 4)).map(
            lambda pair: tokenizer.encode(pair[0], add_special_tokens=False)[: pair[1]]
        ),
        st.just([unknown(tokenizer)]),
    )
    ids = [token for part in draw(st.lists(piece, max_size=6)) for token in part]
    text = tokenizer.decode(ids)
    taken = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5)).map(lambda at: text[at[0] :][: at[1]])
    made_up = st.text("STOP helo\ufffd你🙂", min_size=1, max_size=4)
    stop = draw(st.lists(st.one_of(taken.filter(bool), made_up) if text else made_up, max_size=3))
    return tokenizer, ids, tuple(stop)


@settings(max_examples=400, deadline=None)
@given(streams())
def test_pieces_add_up_to_the_decoded_text_before_the_stop_string(
    stream_case: tuple[TextTokenizer, list[int], tuple[str, ...]],
) -> None:
    tokenizer, ids, stop = stream_case
    expected = cut(tokenizer.decode(ids), stop)
    stream = TextStream(tokenizer, stop)
    given_out = ""
    for token in ids:
        given_out += stream.push(token)
        # Whatever was given out is final: no U+FFFD that turns into a character, no part of the stop string.
        assert expected.startswith(given_out)
        assert stream.text == given_out
    given_out += stream.flush()
    assert given_out == stream.text == expected
    assert stream.finished == any(string in tokenizer.decode(ids) for string in stop)
    assert stream.flush() == ""


@settings(max_examples=150, deadline=None)
@given(streams(), st.data())
def test_no_continuation_changes_what_was_given_out(
    stream_case: tuple[TextTokenizer, list[int], tuple[str, ...]], data: st.DataObject
) -> None:
    tokenizer, ids, stop = stream_case
    stream = TextStream(tokenizer, stop)
    given_out = "".join([stream.push(token) for token in ids])
    more = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5))
    assert cut(tokenizer.decode(ids + more), stop).startswith(given_out)


def pieces(kind: str, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer_of_kind(kind), stop)
    return [*(stream.push(token) for token in ids), stream.flush()]


def byte_tokens(kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    if kind != "byte level":
        return [token_id(kind, f"<0x{byte:02X}>") for byte in data]
    # GPT-2's table: printable bytes stand for themselves, the others for the characters from 256 on, in order.
    printable = {ord(character) for character in pre_tokenizers.ByteLevel.alphabet()} & set(range(256))
    others = [byte for byte in range(256) if byte not in printable]
    return [token_id(kind, chr(byte if byte in printable else 256 + others.index(byte))) for byte in data]


def test_plain_text_is_given_out_token_by_token() -> None:
    tokenizer = tokenizer_of_kind("byte level")
    ids = tokenizer.encode("hello world, hello there")
    assert pieces("byte level", ids) == [*(tokenizer.decode([token]) for token in ids), ""]


def test_a_character_of_several_tokens_waits_for_its_last_byte() -> None:
    assert pieces("byte level", byte_tokens("byte level", "a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_breaks_off_becomes_a_replacement_when_the_next_token_shows_it() -> None:
    half = "🙂".encode()[:2]
    broken = byte_tokens("byte level", half + b"\xff\xffa")
    assert pieces("byte level", broken) == ["", "", "\ufffd", "\ufffd", "\ufffda", ""]
    assert pieces("byte level", byte_tokens("byte level", b"a" + half)) == ["a", "", "", "\ufffd"]


def test_half_a_character_does_not_take_in_bytes_of_a_later_one() -> None:
    # A lead byte that is never completed, then a character whose second byte would complete it.
    assert pieces("byte level", byte_tokens("byte level", b"\xda" + "畖".encode())) == ["", "\ufffd", "", "畖", ""]


@pytest.mark.parametrize("kind", ["sentence piece", "metaspace"])
def test_a_run_of_byte_tokens_waits_for_its_end(kind: str) -> None:
    dot = token_id(kind, ".")
    good, bad = byte_tokens(kind, "你".encode()), byte_tokens(kind, "你".encode() + b"\xff")
    assert pieces(kind, [*good, dot]) == ["", "", "", "你.", ""]
    assert pieces(kind, [*bad, dot]) == ["", "", "", "", "\ufffd" * 4 + ".", ""]
    assert pieces(kind, good) == ["", "", "", "你"]


@pytest.mark.parametrize("kind", ["sentence piece", "metaspace"])
def test_a_special_token_in_the_middle_does_not_swallow_a_space(kind: str) -> None:
    hello, world = token_id(kind, "▁hello"), token_id(kind, "▁world")
    assert pieces(kind, [1, hello, 2, 1, world, 2]) == ["", "hello", "", "", " world", "", ""]


@pytest.mark.parametrize("kind", ["sentence piece", "metaspace"])
def test_a_token_without_text_does_not_swallow_a_space(kind: str) -> None:
    hello, nothing, world = (token_id(kind, token) for token in ("▁hello", "", "▁world"))
    assert pieces(kind, [hello, nothing, world]) == ["hello", "", " world", ""]


def test_an_added_token_that_is_not_special_is_text() -> None:
    tokenizer = tokenizer_of_kind("byte level")
    ids = tokenizer.encode("hello<tool>hello")
    assert "".join(pieces("byte level", ids)) == "hello<tool>hello"


def test_what_may_begin_a_stop_string_is_held_back_and_released() -> None:
    ids = byte_tokens("byte level", b"aSTSTOx")
    stream = TextStream(tokenizer_of_kind("byte level"), ("STOP",))
    assert [stream.push(token) for token in ids] == ["a", "", "", "ST", "", "", "STOx"]
    assert not stream.finished


def test_what_was_held_back_for_a_stop_string_comes_with_the_flush() -> None:
    assert pieces("byte level", byte_tokens("byte level", b"aSTO"), ("STOP",)) == ["a", "", "", "", "STO"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two STOP", ("STOP",), "one "),
        ("aaab", ("aab",), "a"),
        ("abcd", ("bcd", "c"), "ab"),  # "c" is complete before "bcd"
        ("abcd", ("cd", "bcd", "d"), "a"),  # complete at once: the longest
        ("STOP", ("STOP",), ""),
        ("never", ("STOP",), "never"),
        ("你好，世界", ("世",), "你好，"),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    for ids in (byte_tokens("byte level", text.encode()), tokenizer_of_kind("byte level").encode(text)):
        stream = TextStream(tokenizer_of_kind("byte level"), stop)
        assert "".join([*(stream.push(token) for token in ids), stream.flush()]) == expected
        assert stream.finished == (expected != text)


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(tokenizer_of_kind("byte level"), ("b",))
    assert [stream.push(token) for token in byte_tokens("byte level", b"abcabc")] == ["a", "", "", "", "", ""]
    assert (stream.finished, stream.flush(), stream.text) == (True, "", "a")


def test_a_token_costs_the_same_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of_kind("byte level")
    ids = [*tokenizer.encode("naïve café 🙂🙃 hello") * 50, *byte_tokens("byte level", b"\xff" * 500)]
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    stream = TextStream(tokenizer, ("STOP",))
    for token in ids:
        stream.push(token)
    assert stream.text.endswith("\ufffd" * 499)
    assert max(decoded) <= 8


@pytest.mark.parametrize(("kind", "decodings"), [("byte level", 1), ("sentence piece", 2), ("metaspace", 2)])
def test_a_token_is_decoded_behind_others_only_where_they_change_its_text(
    kind: str, decodings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of_kind(kind)
    decoded: list[list[int]] = []
    decode = tokenizer.decode

    def counted(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.append(list(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    ids = [token for token in tokenizer.encode("hello world, hello") if not tokenizer.is_byte_fallback(token)]
    for token in ids:
        stream.push(token)
    assert len(decoded) == decodings * len(ids)


def test_tokenizer_round_trips_and_adds_special_tokens_only_when_asked() -> None:
    tokenizer = tokenizer_of_kind("byte level")
    for text in [*TRAINING_TEXT, "", "\x00\u200b", "</s>"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("a</s>b")) == "ab"
    assert tokenizer.is_special(tokenizer.encode("</s>")[0])
    for _ in range(2):
        assert tokenizer.is_special(unknown(tokenizer))
        assert not tokenizer.is_special(tokenizer.encode("<tool>")[0])


def test_tokenizer_ignores_the_truncation_and_padding_of_training(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("hello there, world")) == "hello there, world"


def test_unreadable_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="tokenizer.json is missing"):
        TextTokenizer(tmp_path / "tokenizer.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": "1.0"')
    with pytest.raises(BundleError, match="broken.json is not a readable tokenizer"):
        TextTokenizer(broken)


def test_text_and_ids_that_cannot_be_converted_are_refused() -> None:
    tokenizer = tokenizer_of_kind("byte level")
    with pytest.raises(RequestError, match="is a int, expected a string"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="half a character"):
        tokenizer.encode("a\ud83d")
    for ids in ([-1], [2**32], ["a"], [1.5]):
        with pytest.raises(RequestError, match="token ids must be integers"):
            tokenizer.decode(ids)  # type: ignore[arg-type]
