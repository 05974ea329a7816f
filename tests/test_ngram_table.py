"""The cross-request n-gram table: what it learns, that it stays small, and its file."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.errors import BundleError, RequestError
from edge_spec.runtime.drafters.ngram_table import NgramTable

VOCAB = 1000


@pytest.fixture
def table() -> NgramTable:
    learned = NgramTable("digest", VOCAB, slot_bits=12)
    learned.learn([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4, 6])
    return learned


def known(table: NgramTable, text: list[int]) -> list[tuple[int, list[int], list[int]]]:
    return [tuple(table.successors(text[:end])) for end in range(len(text) + 1)]  # type: ignore[misc]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6))
def test_knows_what_followed_the_longest_context_in_any_text(texts: list[list[int]]) -> None:
    table = NgramTable("digest", VOCAB, slot_bits=16)  # so large that no two contexts meet
    followers: dict[tuple[int, ...], list[int]] = {}
    for text in texts:
        table.learn(text)
        for end in range(2, len(text)):
            for length in range(2, min(4, end) + 1):
                followers.setdefault(tuple(text[end - length : end]), []).append(text[end])
    for text in texts:
        for end in range(len(text) + 1):
            found = table.successors(text[:end])
            longest = next((n for n in (4, 3, 2) if n <= end and tuple(text[end - n : end]) in followers), 0)
            assert found.context == longest
            followed = followers.get(tuple(text[end - longest : end]), []) if longest else []
            assert dict(zip(found.tokens, found.counts, strict=True)) == Counter(followed)
            assert found.counts == sorted(found.counts, reverse=True)


def test_of_tokens_that_followed_as_often_the_latest_comes_first() -> None:
    table = NgramTable("digest", VOCAB)
    for token in (5, 6, 6, 5, 7):
        table.learn([1, 2, token])
    assert table.successors([1, 2]) == (2, [5, 6, 7], [2, 2, 1])


def test_learns_only_from_where_it_is_told() -> None:
    table = NgramTable("digest", VOCAB)
    table.learn([1, 2, 3, 4, 5], start=4)
    assert table.successors([1, 2]).context == 0
    assert table.successors([1, 2, 3]).context == 0
    assert table.successors([1, 2, 3, 4]) == (4, [5], [1])


def test_what_is_seen_often_stays_and_what_is_seen_no_more_goes() -> None:
    table = NgramTable("digest", VOCAB, slot_bits=6)
    frequent, stale = [1, 2, 3], [4, 5, 6]
    for _ in range(20):
        table.learn(stale)
    random = np.random.default_rng(0)
    for _ in range(3000):
        table.learn(random.integers(10, VOCAB, 8).tolist())
        table.learn(frequent)
    assert table.successors(frequent[:2]).tokens[0] == 3
    assert 6 not in table.successors(stale[:2]).tokens


def test_a_habit_that_changes_is_unlearned() -> None:
    table = NgramTable("digest", VOCAB)
    for _ in range(2000):
        table.learn([1, 2, 3])
    assert table.successors([1, 2]).counts[0] <= 255
    for _ in range(300):
        table.learn([1, 2, 4])
    assert table.successors([1, 2]).tokens[0] == 4


def test_memory_stays_the_same_whatever_is_learned() -> None:
    tracemalloc.start()
    table = NgramTable("digest", VOCAB, slot_bits=10)
    before = table.memory_bytes
    assert before < 25 * 2**10 + 500
    random = np.random.default_rng(0)
    text = random.integers(0, VOCAB, 5000).tolist()
    start, _ = tracemalloc.get_traced_memory()
    table.learn(text)
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.memory_bytes == before and end - start < 2000
    assert 900 < table.contexts <= 1024


def test_a_saved_table_knows_the_same(table: NgramTable, tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    table.save(path)
    loaded = NgramTable.load(path, "digest", VOCAB, slot_bits=12)
    text = [1, 2, 3, 4, 6, 1, 2, 3, 4, 5, 1]
    assert known(loaded, text) == known(table, text)
    assert loaded.contexts == table.contexts > 0
    loaded.learn([1, 2, 3, 4, 5])
    assert loaded.successors([2, 3, 4]).counts == [2, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["table.bin"]


@pytest.mark.parametrize("slot_bits", [1, 4, 16])
def test_a_table_of_another_size_takes_what_fits(table: NgramTable, tmp_path: Path, slot_bits: int) -> None:
    path = tmp_path / "table.bin"
    table.save(path)
    loaded = NgramTable.load(path, "digest", VOCAB, slot_bits)
    assert 0 < loaded.contexts <= min(table.contexts, 2**slot_bits)
    if slot_bits == 16:
        assert loaded.contexts == table.contexts
        assert loaded.successors([1, 2, 3, 4]) == table.successors([1, 2, 3, 4])


def test_an_empty_table_can_be_saved(tmp_path: Path) -> None:
    NgramTable("", VOCAB).save(tmp_path / "table.bin")
    assert NgramTable.load(tmp_path / "table.bin", "", VOCAB).contexts == 0


def test_a_failed_save_leaves_the_file_as_it_was(
    table: NgramTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.bin"
    table.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    table.learn([7, 8, 9])
    with pytest.raises(BundleError, match="table.bin cannot be written: No space left on device"):
        table.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["table.bin"]


def test_a_table_is_refused_for_another_tokenizer(table: NgramTable, tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    table.save(path)
    for tokenizer, vocab_size in (("other", VOCAB), ("digest", VOCAB - 1), ("digest", VOCAB + 1), ("", VOCAB)):
        with pytest.raises(BundleError, match="table.bin was made for another tokenizer; delete it"):
            NgramTable.load(path, tokenizer, vocab_size)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothing.bin cannot be read: No such file"):
        NgramTable.load(tmp_path / "nothing.bin", "digest", VOCAB)
    with pytest.raises(BundleError, match="cannot be written"):
        NgramTable("digest", VOCAB).save(tmp_path / "nowhere" / "table.bin")


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "table.bin"
    table = NgramTable("digest", VOCAB, slot_bits=8)
    table.learn([1, 2, 3, 4, 5, 6, 1, 2, 3, 7])
    table.save(path)
    sound = path.read_bytes()
    damage = data.draw(st.sampled_from(["cut", "grown", "changed"]))
    if damage == "cut":
        broken = sound[: data.draw(st.integers(0, len(sound) - 1))]
    elif damage == "grown":
        broken = sound + data.draw(st.binary(min_size=1, max_size=40))
    else:
        place = data.draw(st.integers(0, len(sound) - 1))
        broken = sound[:place] + bytes([sound[place] ^ data.draw(st.integers(1, 255))]) + sound[place + 1 :]
    path.write_bytes(broken)
    with pytest.raises(BundleError, match=r"table\.bin (is|has|holds) .*; delete it"):
        NgramTable.load(path, "digest", VOCAB)


@pytest.mark.parametrize(
    ("contexts", "token", "counts", "problem"),
    [
        (1, VOCAB, (1, 0, 0), "holds token ids of 1000 or more"),
        (1, 3, (0, 0, 0), "holds counts that do not descend"),
        (1, 3, (1, 2, 0), "holds counts that do not descend"),
        (2, 3, (1, 0, 0), "has 55 bytes, expected 78"),
        (2**32 - 1, 3, (1, 0, 0), "has 55 bytes, expected"),
    ],
)
def test_a_forged_file_is_refused(
    tmp_path: Path, contexts: int, token: int, counts: tuple[int, ...], problem: str
) -> None:
    path = tmp_path / "table.bin"
    body = struct.pack("<IIH6sQ3I3B", VOCAB, contexts, 6, b"digest", 5, token, 0, 0, *counts)
    path.write_bytes(struct.pack("<8sII", b"EDGENGRM", 1, zlib.crc32(body)) + body)
    with pytest.raises(BundleError, match=problem):
        NgramTable.load(path, "digest", VOCAB)


def test_a_file_of_a_later_version_is_refused(table: NgramTable, tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    table.save(path)
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    path.write_bytes(data)
    with pytest.raises(BundleError, match="has version 2, expected 1"):
        NgramTable.load(path, "digest", VOCAB)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "slot_bits", "problem"),
    [
        ("x" * 1025, VOCAB, 16, "takes more than 1024 bytes"),
        ("digest", 0, 16, "vocab_size is 0, expected 1 to"),
        ("digest", 2**32, 16, "vocab_size is 4294967296, expected 1 to"),
        ("digest", VOCAB, 0, "slot_bits is 0, expected 1 to 22"),
        ("digest", VOCAB, 23, "slot_bits is 23, expected 1 to 22"),
    ],
)
def test_impossible_sizes_are_refused(tokenizer: str, vocab_size: int, slot_bits: int, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        NgramTable(tokenizer, vocab_size, slot_bits)
