"""Prompt files of benchmarks: what is read, what is chosen, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec import Grammar, PromptRecorder
from edge_spec.bench.prompts import SHIPPED_PROMPTS, alternate, pick, without_template
from edge_spec.errors import RequestError
from edge_spec.prompt_file import Question, read_questions


def write(folder: Path, *entries: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), "utf-8")
    return path


def numbered(*categories: str) -> list[Question]:
    return [Question(line, str(line), category, "text") for line, category in enumerate(categories, 1)]


def test_the_shipped_set_has_four_prompts_of_each_of_six_tasks() -> None:
    questions = read_questions(SHIPPED_PROMPTS, turns=2)
    assert Counter(question.category for question in questions) == dict.fromkeys(
        (
            "multi-turn conversation",
            "translation",
            "summarization",
            "question answering",
            "mathematical reasoning",
            "retrieval-augmented generation",
        ),
        4,
    )
    assert all(bool(question.followups) == (question.category == "multi-turn conversation") for question in questions)
    assert len({json.dumps(question.opening) for question in questions}) == 24


def test_categories_of_spec_bench_count_under_its_six_tasks(tmp_path: Path) -> None:
    names = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    others = ("translation", "summarization", "qa", "math_reasoning", "rag", "my own")
    path = write(tmp_path, *({"category": name, "turns": ["Hi"]} for name in (*names, *others)))
    assert [question.category for question in read_questions(path)] == [
        *["multi-turn conversation"] * 8,
        "translation",
        "summarization",
        "question answering",
        "mathematical reasoning",
        "retrieval-augmented generation",
        "my own",
    ]


def test_as_many_turns_are_used_as_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 81, "category": "writing", "turns": ["one", "two", "three"]})
    for turns, followups in ((1, ()), (2, ("two",)), (9, ("two", "three"))):
        (question,) = read_questions(path, turns)
        assert question == Question(
            1, "81", "multi-turn conversation", ({"role": "user", "content": "one"},), followups
        )


def test_a_log_may_hold_text_chats_and_turns(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path, {"prompt": "def f("}, {"messages": chat, "category": "chat"}, {"turns": ["Hello"]})
    assert read_questions(path, recorded=True) == [
        Question(1, "line 1", "recorded", "def f("),
        Question(2, "line 2", "chat", tuple(chat)),
        Question(3, "line 3", "recorded", ({"role": "user", "content": "Hello"},)),
    ]


@pytest.mark.parametrize(
    ("line", "recorded", "message"),
    [
        ("{oops", False, "line 2: not valid JSON"),
        ("[" * 100_000, False, "line 2: not valid JSON"),
        ("[1]", False, "line 2: a list, expected an object such as"),
        ('{"turns": ["Hi"]}', False, "line 2: category is None, expected a name"),
        ('{"category": "qa"}', False, "line 2: no turns, expected a list of what the user says"),
        ('{"category": "qa", "prompt": "Hi"}', False, "line 2: no turns"),
        ('{"category": "qa", "turns": "Hi"}', False, "line 2: turns is 'Hi', expected a list"),
        ('{"category": "qa", "turns": []}', False, "line 2: turns is \\[\\]"),
        ('{"category": "qa", "turns": ["Hi", 3]}', False, "line 2: turns is"),
        ('{"prompt": 3}', True, "line 2: prompt is 3, expected text"),
        ('{"prompt": ""}', True, "line 2: prompt is '', expected text"),
        ('{"messages": []}', True, "line 2: messages is empty"),
        ('{"messages": [{"content": "Hi"}]}', True, "line 2: message 0 has the role None"),
        ('{"category": "qa"}', True, "line 2: no turns, expected prompt, token_ids, messages or turns"),
        ('{"token_ids": []}', True, "line 2: token_ids is a list, expected a list of integers"),
        ('{"token_ids": [1, true]}', True, "line 2: token_ids is a list"),
        ('{"token_ids": [-1]}', True, "line 2: token_ids is a list"),
        ('{"prompt": "Hi", "options": [1]}', True, "line 2: options is a list, expected an object"),
        ('{"prompt": "Hi", "options": {"deadline": 1}}', True, "line 2: options has 'deadline', expected any of max_"),
        ('{"prompt": "Hi", "options": {"top_p": 2}}', True, "line 2: top_p is 2, expected a number above 0"),
        ('{"prompt": "Hi", "options": {"logit_bias": {"x": 1}}}', True, "line 2: logit_bias is .'x': 1"),
        ('{"prompt": "Hi", "options": {"grammar": "a+"}}', True, "line 2: options has the grammar 'a.', expected an"),
        ('{"prompt": "Hi", "options": {"grammar": {"regex": "("}}}', True, "line 2: The grammar '.' cannot be used"),
        ('{"prompt": "Hi", "options": {"grammar": {"bnf": "x"}}}', True, "line 2: A grammar's kind is 'bnf'"),
        ('{"prompt": "Hi", "options": {"max_new_tokens": 0}}', True, "line 2: options has max_new_tokens 0"),
        ('{"prompt": "Hi", "category": 3}', True, "line 2: category is 3"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(line: str, recorded: bool, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(RequestError, match=message):
        read_questions(path, recorded=recorded)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n  \n")
    with pytest.raises(RequestError, match="holds no prompts; expected one JSON object a line"):
        read_questions(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="is not UTF-8"):
        read_questions(path)
    with pytest.raises(RequestError, match="nowhere.jsonl cannot be read"):
        read_questions(tmp_path / "nowhere.jsonl")


def test_a_log_may_say_how_to_answer(tmp_path: Path) -> None:
    options = {"temperature": 0.7, "stop": ["\n"], "logit_bias": {"3": -1.5}, "seed": None, "max_new_tokens": 9}
    path = write(tmp_path, {"token_ids": [5, 6], "options": options})
    asked = {"temperature": 0.7, "stop": ["\n"], "logit_bias": {3: -1.5}, "max_new_tokens": 9}
    assert read_questions(path, recorded=True) == [Question(1, "line 1", "recorded", (5, 6), (), asked)]


@pytest.mark.parametrize("grammar", [Grammar.regex("[a-c]+"), Grammar.json_schema({"type": "object"})])
def test_a_recorded_grammar_is_replayed(grammar: Grammar, tmp_path: Path) -> None:
    recorder = PromptRecorder(tmp_path / "prompts.jsonl")
    recorder.record("text", {"grammar": grammar, "seed": 3})
    (question,) = read_questions(recorder.path, recorded=True)
    assert question.options == {"grammar": grammar, "seed": 3}


def test_line_separators_within_a_text_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', "utf-8")
    assert [question.opening for question in read_questions(path, recorded=True)] == ["a\u2028b"]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 9))
def test_questions_are_picked_evenly_and_in_order(categories: list[str], most: int) -> None:
    questions = numbered(*categories)
    picked = pick(questions, per_category=most)
    assert [question.line for question in picked] == sorted({question.line for question in picked})
    for category, count in Counter(categories).items():
        places = [question.line for question in questions if question.category == category]
        chosen = [places.index(question.line) for question in picked if question.category == category]
        assert len(chosen) == min(most, count)
        gaps = [right - left for left, right in zip([-1, *chosen], [*chosen, count], strict=True)]
        assert max(gaps) <= -(-count // len(chosen)) + 1


def test_categories_can_be_chosen_by_either_name() -> None:
    questions = numbered("question answering", "summarization", "question answering")
    for name in ("qa", "question answering"):
        assert [question.line for question in pick(questions, [name])] == [1, 3]
    with pytest.raises(RequestError, match="no category 'chess' .* expected one of 'question answering', 'summ"):
        pick(questions, ["chess"])
    with pytest.raises(RequestError, match="per_category is 0"):
        pick(questions, per_category=0)


def test_categories_take_turns() -> None:
    assert [question.line for question in alternate(numbered(*"aaabbc"))] == [1, 4, 6, 2, 5, 3]


def test_without_a_chat_template_single_prompts_are_continued_as_text(tmp_path: Path) -> None:
    path = write(tmp_path, {"category": "qa", "turns": ["one", "two"]})
    assert [question.opening for question in without_template(read_questions(path))] == ["one"]
    ids = [Question(1, "1", "recorded", (5, 6))]
    assert without_template(ids) == ids
    with pytest.raises(RequestError, match="line 1 is a conversation, but this bundle has no chat template"):
        without_template(read_questions(path, turns=2))
