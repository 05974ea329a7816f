"""What a benchmark asks: questions from a JSON Lines file, one kind of task beside the other."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.prompt_record import REPLAYED_OPTIONS
from edge_spec.record_json import shown
from edge_spec.runtime.chat_template import checked_messages
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.sampling_params import SamplingParams

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
RECORDED = "recorded"

# Spec-Bench's categories, by the task it counts them under.
_TASKS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        "multi-turn conversation",
    ),
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}

Message = Mapping[str, Any]
Opening = str | tuple[int, ...] | tuple[Message, ...]


@dataclass(frozen=True)
class Question:
    """One line of a prompt file.

    Attributes:
        line: its number in the file, from 1.
        name: its ``question_id``, or the line's number where it has none.
        category: the task it counts under.
        opening: text or token ids to continue as they are, or the messages of a chat.
        followups: what the user says after each answer.
        options: what it asks for itself, whatever the run asks for.
    """

    line: int
    name: str
    category: str
    opening: Opening
    followups: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def read_questions(path: Path, turns: int = 1, recorded: bool = False) -> list[Question]:
    """Read a prompt file, in the order of its lines.

    Args:
        path: JSON Lines. Each line has ``turns``, what a user says one after the other, and a ``category``.
        turns: how many turns to use of each line.
        recorded: a log of prompts instead: each line has ``prompt``, ``token_ids``, ``messages`` or ``turns``, and may
            have a category and ``options``, as :class:`edge_spec.PromptRecorder` writes them.

    Raises:
        RequestError: the file cannot be read, a line is malformed, or there is none.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror or error}); expected a file of prompts.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text ({error}); expected one JSON object a line.") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(_question(number, json.loads(line), turns, recorded))
            except (ValueError, RecursionError) as error:  # a RequestError is a ValueError
                reason = f"not valid JSON ({error})" if not isinstance(error, RequestError) else str(error)
                raise RequestError(f"{path}, line {number}: {reason}") from None
    if not questions:
        raise RequestError(f"{path} holds no prompts; expected one JSON object a line, such as {_example(recorded)}")
    return questions


def pick(
    questions: Sequence[Question], categories: Sequence[str] = (), per_category: int | None = None
) -> list[Question]:
    """Choose questions, in the order of the file.

    Args:
        questions: what there is.
        categories: keep only these; none keeps all.
        per_category: most questions of each, spread evenly; ``None`` keeps all.

    Raises:
        RequestError: there is no such category, or ``per_category`` is below 1.
    """
    by_category: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_category[question.category].append(question)
    wanted = {_TASKS.get(name, name) for name in categories} or set(by_category)
    if unknown := sorted(wanted - set(by_category)):
        known = ", ".join(map(repr, by_category))
        raise RequestError(f"there is no category {unknown[0]!r} among the prompts; expected one of {known}.")
    if per_category is not None and per_category < 1:
        raise RequestError(f"per_category is {per_category}, expected at least 1.")
    chosen: set[int] = set()
    for name in wanted:
        there = by_category[name]
        count = min(len(there), per_category or len(there))
        # The middles of equal parts, so that the choice never hangs on how a file begins.
        chosen.update(there[(2 * part + 1) * len(there) // (2 * count)].line for part in range(count))
    return [question for question in questions if question.line in chosen]


def alternate(questions: Iterable[Question]) -> list[Question]:
    """Order questions so that categories take turns: a run that ends early has measured all of them."""
    places: dict[str, int] = defaultdict(int)
    keyed = []
    for question in questions:
        keyed.append((places[question.category], question))
        places[question.category] += 1
    return [question for _, question in sorted(keyed, key=lambda entry: entry[0])]


def without_template(questions: Iterable[Question]) -> list[Question]:
    """Return the questions for a bundle that has no chat template: a single turn is continued as text.

    Raises:
        RequestError: a question is a conversation.
    """
    texts = []
    for question in questions:
        if question.followups or (isinstance(question.opening[0], Mapping) and len(question.opening) > 1):
            raise RequestError(
                f"the prompt of line {question.line} is a conversation, but this bundle has no chat template; use a "
                "file of single prompts, and one turn of each."
            )
        first = question.opening[0]
        texts.append(replace(question, opening=first["content"] if isinstance(first, Mapping) else question.opening))
    return texts


def _question(number: int, entry: Any, turns: int, recorded: bool) -> Question:
    if not isinstance(entry, Mapping):
        raise RequestError(f"a {type(entry).__name__}, expected an object such as {_example(recorded)}")
    category = entry.get("category", RECORDED if recorded else None)
    if not isinstance(category, str) or not category:
        raise RequestError(f"category is {category!r}, expected a name, as in {_example(recorded)}")
    name = str(entry.get("question_id", f"line {number}"))
    opening, followups = _conversation(entry, turns, recorded)
    options = _options(entry.get("options", {})) if recorded else {}
    return Question(number, name, _TASKS.get(category, category), opening, followups, options)


def _conversation(entry: Mapping[str, Any], turns: int, recorded: bool) -> tuple[Opening, tuple[str, ...]]:
    if recorded and "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise RequestError(f"prompt is {entry['prompt']!r}, expected text.")
        return entry["prompt"], ()
    if recorded and "token_ids" in entry:
        ids = entry["token_ids"]
        if not isinstance(ids, list) or not ids or not all(map(_is_token_id, ids)):
            raise RequestError(f"token_ids is {shown(ids)}, expected a list of integers of at least 0.")
        return tuple(ids), ()
    if recorded and "messages" in entry:
        return tuple(checked_messages(entry["messages"])), ()
    said = entry.get("turns")
    if not isinstance(said, list) or not said or not all(isinstance(turn, str) and turn for turn in said):
        what = "no turns" if said is None else f"turns is {said!r}"
        expected = "prompt, token_ids, messages or turns" if recorded else "a list of what the user says"
        raise RequestError(f"{what}, expected {expected}, as in {_example(recorded)}")
    return ({"role": "user", "content": said[0]},), tuple(said[1:turns])


def _options(given: Any) -> dict[str, Any]:
    """Check the options that a line brings, all but the ids, which only a model's vocabulary can check."""
    if not isinstance(given, Mapping):
        raise RequestError(f'options is {shown(given)}, expected an object such as {{"temperature": 0.7}}')
    if unknown := sorted(given.keys() - set(REPLAYED_OPTIONS)):
        raise RequestError(f"options has {unknown[0]!r}, expected any of {', '.join(REPLAYED_OPTIONS)}.")
    options = {name: value for name, value in given.items() if value is not None}
    bias = options.get("logit_bias")
    if isinstance(bias, Mapping) and all(token.isdecimal() for token in bias):
        options["logit_bias"] = {int(token): value for token, value in bias.items()}  # keys of JSON are text
    grammar = options.pop("grammar", None)
    SamplingParams(**options)
    if options.get("max_new_tokens") == 0:
        raise RequestError("options has max_new_tokens 0, expected at least 1: an empty answer measures nothing.")
    if grammar is None:
        return options
    if not isinstance(grammar, Mapping) or len(grammar) != 1:
        raise RequestError(f'options has the grammar {shown(grammar)}, expected an object such as {{"regex": "a+"}}')
    ((kind, text),) = grammar.items()
    return {**options, "grammar": Grammar(kind, text)}


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _example(recorded: bool) -> str:
    return '{"prompt": "Once upon a time"}' if recorded else '{"category": "qa", "turns": ["Why is the sky blue?"]}'
