"""Which questions a benchmark asks, and in which order: one kind of task beside the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edge_spec.errors import RequestError
from edge_spec.prompt_file import TASKS, Question

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")


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
    wanted = {TASKS.get(name, name) for name in categories} or set(by_category)
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
