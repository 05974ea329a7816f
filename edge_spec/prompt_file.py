"""A file of prompts, a benchmark's or a recorder's: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.prompt_record import REPLAYED_OPTIONS
from edge_spec.record_json import shown
from edge_spec.runtime.chat_template import checked_messages
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.sampling_params import SamplingParams

RECORDED = "recorded"

# Spec-Bench's categories, by the task it counts them under.
TASKS = {
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


def _question(number: int, entry: Any, turns: int, recorded: bool) -> Question:
    if not isinstance(entry, Mapping):
        raise RequestError(f"a {type(entry).__name__}, expected an object such as {_example(recorded)}")
    category = entry.get("category", RECORDED if recorded else None)
    if not isinstance(category, str) or not category:
        raise RequestError(f"category is {category!r}, expected a name, as in {_example(recorded)}")
    name = str(entry.get("question_id", f"line {number}"))
    opening, followups = _conversation(entry, turns, recorded)
    options = _options(entry.get("options", {})) if recorded else {}
    return Question(number, name, TASKS.get(category, category), opening, followups, options)


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
