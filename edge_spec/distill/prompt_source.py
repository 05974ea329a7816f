"""Where prompts come from: the set that ships, or a file of a user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from edge_spec.errors import RequestError
from edge_spec.prompt_file import Question

Opening = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Asker(Enum):
    """Who asks, where nobody else does."""

    TARGET = "the target, in the user's place of its chat template"


class PromptSource(Protocol):
    """Prompts by their numbers.

    Attributes:
        name: says which prompts these are, so that a run is only ever continued with its own.
    """

    @property
    def name(self) -> str:
        """Which prompts these are."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def opening(self, number: int, answer_to: Callable[[int], str]) -> Opening | Asker:
        """What is asked: text, token ids or messages; or who is to ask.

        Args:
            number: from 0.
            answer_to: the target's answer to a prompt whose number is lower by at least :data:`ANSWERED_BEFORE`.
        """
        ...


# By so many numbers a prompt that builds on an answer comes after the one that was answered.
ANSWERED_BEFORE = 256


class ListedPrompts:
    """Prompts that stand for themselves, such as those of a user's file."""

    def __init__(self, openings: Sequence[Opening], name: str, places: Sequence[str] = ()) -> None:
        """Take what is asked, the name of all, and where each stands, for messages."""
        self._openings = list(openings)
        self._places = places or [f"prompt {number}" for number in range(len(openings))]
        self.name = name

    def check(self, encode: Callable[[Opening], object]) -> None:
        """Raise RequestError for the first one that cannot be encoded, before hours are spent on others."""
        place = ""
        try:
            for opening, place in zip(self._openings, self._places, strict=True):  # noqa: B007 - told if it fails
                encode(opening)
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._openings)

    def opening(self, number: int, answer_to: Callable[[int], str]) -> Opening:
        """What is asked; no answer is needed for it."""
        return self._openings[number]


def listed(questions: Sequence[Question], file: Path) -> ListedPrompts:
    """The prompts of a user's file, of conversations what is said up to the first answer."""
    openings = [question.opening for question in questions]
    digest = hashlib.sha256(repr(openings).encode("utf-8", "surrogatepass")).hexdigest()
    places = [f"{file}, line {question.line}" for question in questions]
    return ListedPrompts(openings, f"file {digest[:16]}", places)
