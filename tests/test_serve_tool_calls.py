"""Tool calls are found in a text however it is cut into pieces, and everything else stays as it was written."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from edge_spec.serve.tool_calls import CLOSE, OPEN, ToolCallReader, read_call

PARTS = st.lists(
    st.one_of(
        st.sampled_from([OPEN, CLOSE, "<tool", "_call>", "<", " ", "\n", '{"name": "f", "arguments": {}}', "{", "}"]),
        st.text(alphabet="ab \n<", max_size=4),
    ),
    max_size=12,
).map("".join)


def read(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader()
    content = ""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        content += reader.push(text[start:end])[0]
    content += reader.finish()[0]
    return content, [(call.name, call.arguments) for call in reader.calls]


@given(PARTS, st.lists(st.integers(0, 200)))
@example(f"a {OPEN}b{CLOSE}", [3])
def test_pieces_do_not_matter(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == read(text, [])


@given(PARTS, st.lists(st.integers(0, 200)))
def test_a_text_without_calls_stays_as_it_was_written(text: str, cuts: list[int]) -> None:
    content, calls = read(text, cuts)
    if not calls:
        assert content == text


@given(st.text(), st.dictionaries(st.text(), st.integers() | st.text()))
def test_a_call_is_read_whatever_its_arguments(name: str, arguments: dict[str, int | str]) -> None:
    call = read_call(f"\n{json.dumps({'name': name, 'arguments': arguments})}\n")
    assert call is not None and call.name == name and json.loads(call.arguments) == arguments


def test_what_is_no_call_is_not_taken_for_one() -> None:
    for text in ("", "[]", "{}", '{"name": 3}', "{" * 100_000, "[" * 100_000, "null", '{"arguments": {}}'):
        assert read_call(text) is None


def test_a_call_that_is_cut_off_before_its_end_mark_counts() -> None:
    assert read(f'x {OPEN}{{"name": "f", "arguments": {{}}}}', []) == ("x", [("f", "{}")])


def test_content_comes_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader()
    assert [reader.push(piece)[0] for piece in ("ab", "c <to", "y", "s>", " ")] == ["ab", "c", " <toy", "s>", ""]
