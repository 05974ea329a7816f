"""A text read in another tokenizer's tokens, and that tokenizer's text written in the target's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_pairs, loaded, sentence_pieces

from edge_spec.runtime.drafters.reencoded_text import ReencodedText
from edge_spec.runtime.tokenizer import TextTokenizer

SPECIALS = ("<|end|>", "<|im_start|>")
WORDS = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "t"), ("Ġt", "he"), ("Ġ", "a"), ("Ġa", "n"), ("h", "e"), ("Ã", "©")]
OTHER_WORDS = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("n", "Ġ"), ("e", "r"), ("1", "2"), ("Ģ", "Ļ"), ("Ġ", "Ġ")]
PIECES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "n"), ("▁a", "n")]


@functools.cache
def tokenizer(name: str) -> TextTokenizer:
    kinds = {
        "words": lambda: byte_pairs(WORDS, SPECIALS),
        "other words": lambda: byte_pairs(OTHER_WORDS, (*SPECIALS[:1], "<|tool|>")),
        "digits": lambda: byte_pairs([*OTHER_WORDS, ("a", "t")], SPECIALS, digits=True),
        "pieces": lambda: sentence_pieces(PIECES, SPECIALS),
    }
    return loaded(kinds[name]())


def between(target: str, own: str) -> ReencodedText:
    ours, theirs = tokenizer(target), tokenizer(own)
    return ReencodedText(ours, theirs, ours.vocab_size, theirs.vocab_size)


names = st.sampled_from(["words", "other words", "digits", "pieces"])
texts = st.text(st.sampled_from("theanr 12é’🙂\n"), max_size=120)


@settings(max_examples=200, deadline=None)
@given(names, names, texts)
def test_what_the_draft_reads_spells_the_text(target: str, own: str, text: str) -> None:
    ours, theirs = tokenizer(target), tokenizer(own)
    tokens = ours.encode(text, False)[-60:]
    assume("\ufffd" not in ours.decode(tokens))  # cut off within a character
    assert theirs.decode(between(target, own).read(tokens)).strip() == ours.decode(tokens).strip()


@settings(max_examples=150, deadline=None)
@given(names, names, st.data())
def test_however_a_text_grows_and_shrinks_it_is_read_to_its_end(target: str, own: str, data: st.DataObject) -> None:
    ours, theirs = tokenizer(target), tokenizer(own)
    reader, text = between(target, own), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        del text[data.draw(st.integers(0, len(text))) if data.draw(st.booleans()) else len(text) :]
        text += ours.encode(data.draw(texts), False)
        spelled, read = ours.decode(text), theirs.decode(reader.read(text))
        if spelled.endswith("\ufffd"):
            assert not read
        else:
            # Where a character was cut off, the target may lose a whole run of bytes, and the reader less of it.
            ours_end, read_end = spelled.rpartition("\ufffd")[2], read.rpartition("\ufffd")[2].lstrip()
            assert ours_end.endswith(read_end) or ("\ufffd" in spelled and read_end.endswith(ours_end))
            assert bool(read.strip()) == bool(spelled[-20:].strip())


@pytest.mark.parametrize("own", ["other words", "digits", "pieces"])
def test_a_growing_text_keeps_the_tokens_it_was_read_in(own: str) -> None:
    """The draft's cache lives on these: all but the last few stay as they were."""
    ours = tokenizer("words")
    text = ours.encode("the anthem 1212 then he\n" * 40, False)
    reader, before = between("words", own), list[int]()
    reader.read(text[:20])
    for length in range(21, len(text), 3):
        after = list(reader.read(text[:length]))
        if before:
            same = sum(takewhile(bool, (a == b for a, b in zip(before, after, strict=False))))
            assert len(before) - same <= 4
        before = after


@settings(max_examples=200, deadline=None)
@given(names, names, texts, st.integers(0, 100), st.integers(0, 30))
def test_what_is_written_says_what_was_drafted(target: str, own: str, text: str, cut: int, count: int) -> None:
    ours, theirs = tokenizer(target), tokenizer(own)
    tokens = theirs.encode(text, False)
    before, drafted = tokens[:cut], tokens[cut : cut + count]
    assume(not theirs.decode(before).endswith("\ufffd"))  # nobody drafts there
    written = between(target, own).write(before, drafted)
    said = theirs.decode([*before, *drafted])
    spoken = said[len(theirs.decode(before)) :] if before else said
    whole = spoken.partition("\ufffd")[0]
    assert ours.decode(written).strip() == whole.strip()


def test_half_a_character_waits_for_the_other_half() -> None:
    ours, theirs = tokenizer("words"), tokenizer("other words")
    text, reader = ours.encode("an 🙂", False), between("words", "other words")
    assert [bool(reader.read(text[:length])) for length in range(len(text) - 4, len(text) + 1)] == [
        True, False, False, False, True
    ]  # fmt: skip
    drafted = theirs.encode("he🙂", False)
    assert ours.decode(reader.write([], drafted[:-1])) == "he"
    assert ours.decode(reader.write([], drafted)) == "he🙂"


def test_special_tokens_go_by_their_texts() -> None:
    ours, theirs = tokenizer("words"), tokenizer("other words")
    end, start, tool = ours.encode("<|end|>")[0], ours.encode("<|im_start|>")[0], theirs.encode("<|tool|>")[0]
    own_end = theirs.encode("<|end|>")[0]
    reader = between("words", "other words")
    the, he = ours.encode("the", False), theirs.encode("he", False)
    # The draft has no <|im_start|>: it is not read, nor spelled out.
    assert reader.read([start, *the, end, *the]) == theirs.encode("the<|end|>the", False)
    assert reader.write([], [*he, own_end, *he]) == [*ours.encode("he", False), end]
    assert reader.write([], [*he, tool, *he]) == ours.encode("he", False)
    assert reader.ends(own_end) and not reader.ends(he[0])


def test_ids_that_a_model_does_not_have_are_neither_read_nor_written() -> None:
    ours, theirs = tokenizer("words"), tokenizer("digits")
    reader = ReencodedText(ours, theirs, 256, 256)

    def low(tokens: Sequence[int]) -> bool:
        return all(token < 256 for token in tokens)

    text = ours.encode("an he an he the", False)
    assert not low(text) and not low(theirs.encode("an he", False))
    assert low(reader.read(text)) and low(reader.write([], theirs.encode("an the", False)))


@pytest.mark.parametrize("target", ["words", "pieces"])
def test_reading_begins_with_a_whole_character(target: str) -> None:
    ours, theirs = tokenizer(target), tokenizer("digits")
    for length in range(60, 68):
        text = ours.encode("🙂" * 60 + "a" * length, False)
        read = theirs.decode(between(target, "digits").read(text))
        assert "\ufffd" not in read and read.endswith("a" * 60)


def test_a_long_prompt_is_read_from_near_its_end() -> None:
    ours = tokenizer("words")
    text = ours.encode("the an " * 500, False)
    assert len(between("words", "digits").read(text)) < 300
