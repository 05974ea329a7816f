"""The prompts that ship: of the kinds that a chat assistant meets, made of templates and words, or asked by the target.

Templates bring the kinds of tasks, but are soon known by heart. What the target writes in the user's place is as varied
as what it was trained on (Xu et al. 2024, Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from edge_spec.distill.prompt_source import ANSWERED_BEFORE, Asker, Opening
from edge_spec.distill.prompt_templates import (
    ARITHMETIC,
    CODE,
    CODE_STYLES,
    EXPLANATIONS,
    EXTRACTION,
    FOLLOW_UPS,
    HOW_TO,
    LENGTHS,
    QUESTIONS,
    READING,
    REASONING,
    ROLE_PLAY,
    SNIPPET_TASKS,
    STYLES,
    SUMMARIES,
    TRANSLATION,
    WORKINGS,
    WRITING,
)
from edge_spec.distill.prompt_words import (
    CLAUSES,
    CODE_TASKS,
    ENGLISH,
    EVENTS,
    FILLINGS,
    GOODS,
    LANGUAGES,
    NAMES,
    PASSAGES,
    PEOPLE,
    PLACES,
    ROLE_QUESTIONS,
    ROLES,
    SNIPPETS,
    SUBJECTS,
    TASKS,
)

# So many distinct ones there are at least, whatever the seed.
SHIPPED_PROMPTS = 20_000

# The kind of those that the target asks.
SELF_ASKED = "self-asked"

# An answer is a passage if it has so many characters. So many answers make one together, of which no more characters
# than these are used.
_SHORTEST_PASSAGE, _LONGEST_PASSAGE, _MOST_ANSWERS = 200, 1800, 3
_SEARCHED = 32


@dataclass(frozen=True)
class _Ask:
    """One prompt.

    Attributes:
        kind: what sort of task it is.
        text: what the user says; ``{passage}`` in it stands for a passage. Empty where the target asks.
        passage: one that can be used where no answer can.
    """

    kind: str
    text: str
    passage: str = ""


class PromptSet:
    """The shipped prompts in the order of a seed, all different.

    Half of them are asked by the target. Of the others, some ask about a passage, for which earlier answers of the
    target are taken where there are good ones, and some go on with an earlier conversation.
    """

    def __init__(self, seed: int = 0) -> None:
        """Begin the set of a seed, an integer of at least 0."""
        self.name = "shipped 3"
        self._dice = np.random.default_rng([seed, 0x5E7])
        self._asks: list[_Ask] = []
        self._seen: set[str] = set()
        self._kinds = [kind for kind, (weight, _) in _KINDS.items() for _ in range(weight)]

    def __len__(self) -> int:
        """How many there are."""
        return SHIPPED_PROMPTS

    def kind(self, number: int) -> str:
        """What sort of task a prompt is."""
        return self._ask(number).kind

    def opening(self, number: int, answer_to: Callable[[int], str]) -> Opening | Asker:
        """The messages of a prompt; see :class:`edge_spec.distill.prompt_source.PromptSource`."""
        ask = self._ask(number)
        if ask.kind == SELF_ASKED:
            return Asker.TARGET
        if ask.kind == "follow-up":
            first = next(other for other in self._asks if other.kind != SELF_ASKED)
            said, answer = next(
                self._earlier(number, answer_to), (_plain(first), "Could you say more precisely what you need?")
            )
            return [_message("user", said), _message("assistant", _shortened(answer)), _message("user", ask.text)]
        passage = ask.passage
        # Half of the passages are composed ones, whose facts nobody knows by heart.
        if passage and number % 2:
            earlier = islice(self._earlier(number, answer_to), 1 + number // 2 % _MOST_ANSWERS)
            passage = _shortened("\n\n".join(answer for _, answer in earlier)) or passage
        return [_message("user", ask.text.replace("{passage}", passage))]

    def _earlier(self, number: int, answer_to: Callable[[int], str]) -> Iterator[tuple[str, str]]:
        """What was asked, and the answer, of the last prompts that may be used and have a passage for their answer."""
        last = number - ANSWERED_BEFORE
        for other in range(last, max(-1, last - _SEARCHED), -1):
            ask = self._ask(other)
            if ask.kind in _PROSE:
                answer = answer_to(other)
                if len(answer) >= _SHORTEST_PASSAGE:
                    yield ask.text, answer

    def _ask(self, number: int) -> _Ask:
        while len(self._asks) <= number:
            kind = self._pick(self._kinds)
            if kind == "follow-up" and len(self._asks) < ANSWERED_BEFORE + _SEARCHED:
                continue  # nothing has been said yet
            ask = _KINDS[kind][1](self)
            if kind == SELF_ASKED:
                is_new = True
            elif ask.passage or kind == "follow-up":
                # What was said before sets them apart, which those that are close may have in common.
                is_new = all(other.text != ask.text for other in self._asks[-_SEARCHED:])
            else:
                is_new = ask.text not in self._seen
            if is_new:
                self._seen.add(ask.text)
                self._asks.append(ask)
        return self._asks[number]

    def _pick(self, words: Sequence[str]) -> str:
        return words[int(self._dice.integers(len(words)))]

    def _number(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``."""
        return int(self._dice.integers(low, high + 1))

    def _question(self) -> _Ask:
        subject = self._pick(SUBJECTS)
        text = self._pick(QUESTIONS).format(subject=subject, other=self._pick(SUBJECTS))
        return _Ask("question", text + self._pick(STYLES))

    def _explanation(self) -> _Ask:
        text = self._pick(EXPLANATIONS).format(subject=self._pick(SUBJECTS))
        return _Ask("explanation", text + self._pick(STYLES))

    def _how_to(self) -> _Ask:
        text = self._pick(HOW_TO).format(task=self._pick(TASKS))
        return _Ask("how-to", text + self._pick(STYLES))

    def _writing(self) -> _Ask:
        words = {
            "person": self._pick(PEOPLE),
            "place": self._pick(PLACES),
            "event": self._pick(EVENTS),
            "subject": self._pick(SUBJECTS),
            "task": self._pick(TASKS),
            "name": self._pick(NAMES),
        }
        return _Ask("writing", self._pick(WRITING).format(**words) + self._pick(LENGTHS))

    def _role_play(self) -> _Ask:
        text = self._pick(ROLE_PLAY).format(role=self._pick(ROLES), question=self._pick(ROLE_QUESTIONS))
        return _Ask("role play", text)

    def _reasoning(self) -> _Ask:
        names = [self._pick(NAMES) for _ in range(4)]
        words = {
            "a": names[0],
            "b": names[1] + ("" if names[1] != names[0] else "'s sister"),
            "c": names[2] + ("" if names[2] not in names[:2] else "'s cousin"),
            "n": self._number(2, 9),
            "m": self._number(10, 60),
            "place": self._pick(PLACES),
            "subject": self._pick(SUBJECTS),
            "other": self._pick(SUBJECTS),
        }
        return _Ask("reasoning", self._pick(REASONING).format(**words))

    def _arithmetic(self) -> _Ask:
        words = {
            "a": self._pick(NAMES),
            "b": self._pick(NAMES),
            "goods": self._pick(GOODS),
            "n": self._number(2, 12),
            "m": self._number(3, 40),
            "k": self._number(2, 9),
            "big": self._number(4, 60) * 12,
            "percent": self._number(1, 9) * 5,
        }
        return _Ask("arithmetic", self._pick(ARITHMETIC).format(**words) + self._pick(WORKINGS))

    def _code(self) -> _Ask:
        if self._number(1, 3) == 1:
            return _Ask("code", self._pick(SNIPPET_TASKS).format(code=self._pick(SNIPPETS)))
        text = self._pick(CODE).format(language=self._pick(LANGUAGES), task=self._pick(CODE_TASKS))
        return _Ask("code", text + self._pick(CODE_STYLES))

    def _translation(self) -> _Ask:
        language = self._pick(list(CLAUSES))
        if self._number(1, 3) == 1:
            sentence, source, goal = self._sentence(ENGLISH), "English", language
        else:
            sentence, source, goal = self._sentence(CLAUSES[language]), language, "English"
        return _Ask("translation", self._pick(TRANSLATION).format(sentence=sentence, source=source, goal=goal))

    def _sentence(self, clauses: Sequence[str]) -> str:
        return " ".join(self._pick(part.split("|")) for part in clauses) + "."

    def _summary(self) -> _Ask:
        return _Ask("summary", self._pick(SUMMARIES), self._passage())

    def _reading(self) -> _Ask:
        return _Ask("reading", self._pick(READING), self._passage())

    def _extraction(self) -> _Ask:
        return _Ask("extraction", self._pick(EXTRACTION), self._passage())

    def _self_asked(self) -> _Ask:
        return _Ask(SELF_ASKED, "")

    def _follow_up(self) -> _Ask:
        return _Ask("follow-up", self._pick(FOLLOW_UPS))

    def _passage(self) -> str:
        words: dict[str, Any] = {name: self._pick(choices.split("|")) for name, choices in FILLINGS.items()}
        words |= {
            "n": self._number(12, 90),
            "n2": self._number(3, 30),
            "few": self._number(2, 9),
            "many": self._number(2, 40) * 500,
            "day": self._number(2, 27),
            "year": self._number(1850, 1930),
            "later": self._number(1935, 1999),
        }
        sentences = PASSAGES[self._number(0, len(PASSAGES) - 1)]
        dropped = self._number(1, len(sentences))  # the first one always stays
        kept = [sentence for place, sentence in enumerate(sentences) if place != dropped]
        return " ".join(kept).format(**words)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _plain(ask: _Ask) -> str:
    return ask.text.replace("{passage}", ask.passage)


def _shortened(text: str) -> str:
    """At most a passage's length, ended behind a sentence where there is one."""
    if len(text) <= _LONGEST_PASSAGE:
        return text
    cut = text[:_LONGEST_PASSAGE]
    end = max(cut.rfind(mark) for mark in (". ", ".\n", "! ", "? "))
    return cut[: end + 1] if end >= _SHORTEST_PASSAGE else cut


# Kinds whose answers can be passages.
_PROSE = ("question", "explanation", "how-to", "writing")

_KINDS: dict[str, tuple[int, Callable[[PromptSet], _Ask]]] = {
    "question": (13, PromptSet._question),
    "explanation": (11, PromptSet._explanation),
    "how-to": (9, PromptSet._how_to),
    "writing": (15, PromptSet._writing),
    "role play": (5, PromptSet._role_play),
    "reasoning": (6, PromptSet._reasoning),
    "arithmetic": (9, PromptSet._arithmetic),
    "code": (10, PromptSet._code),
    "translation": (6, PromptSet._translation),
    "summary": (5, PromptSet._summary),
    "reading": (4, PromptSet._reading),
    "extraction": (2, PromptSet._extraction),
    "follow-up": (5, PromptSet._follow_up),
    SELF_ASKED: (100, PromptSet._self_asked),
}
