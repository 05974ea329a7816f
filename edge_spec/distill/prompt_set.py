"""The prompts that ship: of the kinds that a chat assistant meets, made of templates and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_spec.distill.prompt_source import ANSWERED_BEFORE, Opening
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

# An answer is a passage if it has so many characters, of which no more than these are used.
_SHORTEST_PASSAGE, _LONGEST_PASSAGE = 200, 1200
_SEARCHED = 32


@dataclass(frozen=True)
class _Ask:
    """One prompt.

    Attributes:
        kind: what sort of task it is.
        text: what the user says; ``{passage}`` in it stands for a passage.
        passage: one that can be used where no answer can.
    """

    kind: str
    text: str
    passage: str = ""


class PromptSet:
    """The shipped prompts in the order of a seed, all different.

    Some ask about a passage, for which an earlier answer of the target is taken where there is a good one, and some go
    on with an earlier conversation.
    """

    def __init__(self, seed: int = 0) -> None:
        """Begin the set of a seed, an integer of at least 0."""
        self.name = "shipped 2"
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

    def opening(self, number: int, answer_to: Callable[[int], str]) -> Opening:
        """The messages of a prompt; see :class:`edge_spec.distill.prompt_source.PromptSource`."""
        ask = self._ask(number)
        earlier = self._earlier(number, answer_to) if ask.passage or ask.kind == "follow-up" else None
        if ask.kind == "follow-up":
            said, answer = earlier or (_plain(self._asks[0]), "Could you say more precisely what you need?")
            return [_message("user", said), _message("assistant", answer), _message("user", ask.text)]
        if not ask.passage:
            return [_message("user", ask.text)]
        # Half of the passages are composed ones, whose facts nobody knows by heart.
        passage = earlier[1] if earlier and number % 2 else ask.passage
        return [_message("user", ask.text.replace("{passage}", passage))]

    def _earlier(self, number: int, answer_to: Callable[[int], str]) -> tuple[str, str] | None:
        """What was asked, and the answer, of the last prompt that may be used and has a passage for its answer."""
        last = number - ANSWERED_BEFORE
        for other in range(last, max(-1, last - _SEARCHED), -1):
            ask = self._ask(other)
            if ask.kind in _PROSE:
                answer = answer_to(other)
                if len(answer) >= _SHORTEST_PASSAGE:
                    return ask.text, _shortened(answer)
        return None

    def _ask(self, number: int) -> _Ask:
        while len(self._asks) <= number:
            kind = self._pick(self._kinds)
            if kind == "follow-up" and len(self._asks) < ANSWERED_BEFORE + _SEARCHED:
                continue  # nothing has been said yet
            ask = _KINDS[kind][1](self)
            if ask.passage or kind == "follow-up":
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
        text = self._pick(_QUESTIONS).format(subject=subject, other=self._pick(SUBJECTS))
        return _Ask("question", text + self._pick(_STYLES))

    def _explanation(self) -> _Ask:
        text = self._pick(_EXPLANATIONS).format(subject=self._pick(SUBJECTS))
        return _Ask("explanation", text + self._pick(_STYLES))

    def _how_to(self) -> _Ask:
        text = self._pick(_HOW_TO).format(task=self._pick(TASKS))
        return _Ask("how-to", text + self._pick(_STYLES))

    def _writing(self) -> _Ask:
        words = {
            "person": self._pick(PEOPLE),
            "place": self._pick(PLACES),
            "event": self._pick(EVENTS),
            "subject": self._pick(SUBJECTS),
            "task": self._pick(TASKS),
            "name": self._pick(NAMES),
        }
        return _Ask("writing", self._pick(_WRITING).format(**words) + self._pick(_LENGTHS))

    def _role_play(self) -> _Ask:
        text = self._pick(_ROLE_PLAY).format(role=self._pick(ROLES), question=self._pick(ROLE_QUESTIONS))
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
        return _Ask("reasoning", self._pick(_REASONING).format(**words))

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
        return _Ask("arithmetic", self._pick(_ARITHMETIC).format(**words) + self._pick(_WORKINGS))

    def _code(self) -> _Ask:
        if self._number(1, 3) == 1:
            return _Ask("code", self._pick(_SNIPPET_TASKS).format(code=self._pick(SNIPPETS)))
        text = self._pick(_CODE).format(language=self._pick(LANGUAGES), task=self._pick(CODE_TASKS))
        return _Ask("code", text + self._pick(_CODE_STYLES))

    def _translation(self) -> _Ask:
        language = self._pick(list(CLAUSES))
        if self._number(1, 3) == 1:
            sentence, source, goal = self._sentence(ENGLISH), "English", language
        else:
            sentence, source, goal = self._sentence(CLAUSES[language]), language, "English"
        return _Ask("translation", self._pick(_TRANSLATION).format(sentence=sentence, source=source, goal=goal))

    def _sentence(self, clauses: Sequence[str]) -> str:
        return " ".join(self._pick(part.split("|")) for part in clauses) + "."

    def _summary(self) -> _Ask:
        return _Ask("summary", self._pick(_SUMMARIES), self._passage())

    def _reading(self) -> _Ask:
        return _Ask("reading", self._pick(_READING), self._passage())

    def _extraction(self) -> _Ask:
        return _Ask("extraction", self._pick(_EXTRACTION), self._passage())

    def _follow_up(self) -> _Ask:
        return _Ask("follow-up", self._pick(_FOLLOW_UPS))

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
}

_STYLES = (
    "",
    "",
    "",
    " Answer in two or three sentences.",
    " Keep it short.",
    " Give an example.",
    " Use simple words.",
    " Answer as a numbered list.",
    " Be as precise as you can.",
    " I am a complete beginner.",
    " Explain your reasoning.",
    " Mention one common mistake.",
)
_LENGTHS = ("", "", " Keep it under 100 words.", " Write about 150 words.", " Make it funny.", " Use a calm tone.")
_WORKINGS = ("", "", " Show your steps.", " Think step by step.", " Give only the calculation and the result.")
_CODE_STYLES = (
    "",
    "",
    " Add comments.",
    " Explain how it works.",
    " Include a short example of its use.",
    " Add tests.",
)

_QUESTIONS = (
    "What is the most important thing to know about {subject}?",
    "Why should anybody care about {subject}?",
    "What are three interesting facts about {subject}?",
    "What do people often get wrong about {subject}?",
    "Who would be a good person to ask about {subject}, and what should I ask?",
    "How has our understanding of {subject} changed over time?",
    "What connects {subject} and {other}?",
    "Which is easier to learn about, {subject} or {other}?",
    "Where can I see {subject} in everyday life?",
    "If I had only ten minutes for {subject}, what should I read about?",
    "What are the advantages and disadvantages of knowing a lot about {subject}?",
    "What would the world be like without {subject}?",
)
_EXPLANATIONS = (
    "Explain {subject}.",
    "Explain {subject} to a ten-year-old.",
    "Can you explain {subject} with an analogy?",
    "I have to give a talk about {subject}. What are the key points?",
    "Describe {subject} for an encyclopedia.",
    "Please tell me how {subject} works or came about.",
    "Give me a short introduction to {subject}.",
    "Write a quiz of three questions about {subject}, with answers.",
    "List the main terms one needs to talk about {subject} and define each.",
    "Summarize what is known about {subject}.",
)
_HOW_TO = (
    "How do I {task}?",
    "What is the best way to {task}?",
    "Give me step-by-step instructions to {task}.",
    "I want to {task}, but I don't know where to start. Can you help?",
    "What do I need in order to {task}?",
    "Write a checklist for somebody who wants to {task}.",
    "What should I avoid when I {task}?",
    "How long does it take to {task}, and what does it cost?",
    "My friend tried to {task} and failed. What may have gone wrong?",
)
_WRITING = (
    "Write a short story about {person} in {place} who {event}.",
    "Write the opening paragraph of a novel set in {place}.",
    "Write a poem about {subject}.",
    "Write a haiku about {subject} and one about {place}.",
    "Write a dialogue between {person} and {name} in {place}.",
    "Write a blog post about why everyone should learn to {task}.",
    "Write an e-mail to {name} to say that I cannot come because I have to {task}.",
    "Write a polite e-mail in which I ask {name} for help: I want to {task}.",
    "Write a thank-you note to {person}.",
    "Write a product description for a device that helps people {task}.",
    "Write a review of a documentary about {subject}.",
    "Write a speech about {subject} for a school assembly.",
    "Write a letter from {person} to {name}, sent from {place}.",
    "Write a newspaper article about {person} who {event} in {place}.",
    "Suggest five titles for a book about {subject}.",
    "Write an essay that compares {subject} with {person} who {event}.",
    "Describe {place} so that the reader can smell and hear it.",
    "Write a song text about {person} who {event}.",
)
_ROLE_PLAY = (
    "Imagine you are {role}. {question}",
    "Pretend to be {role} and answer me: {question}",
    "You are {role}. Stay in character. {question}",
    "Let's play a game: you are {role}, I am your visitor. {question}",
    "Speak like {role}. {question}",
)
_REASONING = (
    "{a} is older than {b}, and {b} is older than {c}. Who is the youngest? Explain.",
    "{a} stands in front of {b} in a queue, and {c} stands right behind {b}. Who is in the middle?",
    "There are {m} people in {place}. Each shakes hands with every other one once. How many handshakes is that?",
    "{a} has {n} brothers, and each brother has {n} sisters. How many sisters does {a} have? Discuss what is unclear.",
    "If all glimps are blons and {n} blons are red, must any glimp be red? Explain your answer.",
    "A clock in {place} loses {n} minutes every hour. What does it show {m} hours after it was set right at noon?",
    "{a} says that {b} always lies. {b} says that {c} tells the truth. {c} says nothing. Who can be trusted?",
    "Would you rather spend {n} hours reading about {subject} or about {other}? Argue for both sides, then decide.",
    "Something went missing in {place}. {a}, {b} and {c} were there. Which {n} questions would you ask, and why?",
    "Is it fair that {a} gets {m} per cent of the prize when {b} did {n} tenths of the work? Explain.",
    "Find the odd one out and explain: {subject}, {other}, {place}.",
    "What would happen in {place} if there were no electricity for {n} days?",
    "Argue for and against: every school should teach {subject} for {n} hours a week.",
)
_ARITHMETIC = (
    "{a} has {m} {goods} and buys {n} boxes with {k} {goods} each. How many {goods} does {a} have now?",
    "A shop sells {goods} at {n} euros each. {a} buys {k} and pays with a note of 200 euros. How much change is there?",
    "{a} reads {n} pages on weekdays and {m} pages on each day of the weekend. How many pages is that in {k} weeks?",
    "A train travels {big} kilometres in {n} hours. How fast is it, and how far does it come in {k} hours?",
    "{a} and {b} share {big} {goods} so that {a} gets twice as many as {b}. How many does each get?",
    "A coat costs {big} euros and is reduced by {percent} per cent. What does it cost now?",
    "{a} earns {m} euros an hour and works {n} hours a day, {k} days. How much does {a} earn?",
    "A recipe for {n} people needs {m} grams of flour per person. How much flour is needed for {big} people?",
    "A tank holds {big} litres. {n} litres flow in and {k} litres flow out every minute. When is it full, if ever?",
    "What is {big} divided by {n}, and what is left over?",
    "Calculate {m} x {n} + {big} - {k}.",
    "{a} is {m} years old. In {n} years {a} will be twice as old as {b}. How old is {b} now?",
    "A garden is {m} metres long and {n} metres wide. How much fence is needed, and how large is the garden?",
    "Of {big} {goods}, {percent} per cent are broken and {n} are lost. How many are left?",
    "Solve for x: {n}x + {m} = {big}.",
)
_CODE = (
    "Write a function in {language} that {task}.",
    "Write a {language} program that {task}.",
    "How would you write something in {language} that {task}?",
    "Show me the shortest readable {language} code that {task}.",
    "I am learning {language}. Please show me code that {task}, line by line.",
    "Design a {language} function that {task}. What are its edge cases?",
)
_SNIPPET_TASKS = (
    "What does this code do?\n\n```\n{code}\n```",
    "Find the mistake in this code and correct it, if there is one:\n\n```\n{code}\n```",
    "Explain this code line by line:\n\n```\n{code}\n```",
    "Rewrite this code so that it is easier to read:\n\n```\n{code}\n```",
    "Write tests for this code:\n\n```\n{code}\n```",
    "Translate this code into Python, or into JavaScript if it is Python:\n\n```\n{code}\n```",
)
_TRANSLATION = (
    "Translate from {source} into {goal}: {sentence}",
    "Translate this sentence into {goal}: {sentence}",
    "How do you say this in {goal}? {sentence}",
    "{sentence}\n\nPlease translate the {source} sentence above into {goal}.",
)
_SUMMARIES = (
    "Summarize the following text:\n\n{passage}",
    "Summarize this in one sentence: {passage}",
    "{passage}\n\nGive me the main points of this text as a list.",
    "Shorten this text to about half its length:\n\n{passage}",
    "Write a headline and a short summary for this text:\n\n{passage}",
)
_READING = (
    "{passage}\n\nWhat is this text about, and what is its most important statement?",
    "Read this text and answer: what changed, and why?\n\n{passage}",
    "Using only the text below, say who or what is mentioned first and what is said of it.\n\nText: {passage}",
    "Context: {passage}\n\nQuestion: What happens at the end?\nAnswer:",
    "Context: {passage}\n\nQuestion: Which numbers or amounts are named, and what do they stand for?",
    "{passage}\n\nAsk three questions that this text answers, and answer them.",
    "Is the following text neutral? Quote the words that tell.\n\n{passage}",
)
_EXTRACTION = (
    "List all names of people and places in this text:\n\n{passage}",
    "Extract the key facts from this text as JSON:\n\n{passage}",
    "Make a table of the dates and events in this text:\n\n{passage}",
    "Which nouns occur most often in this text? {passage}",
    "Give five keywords for this text: {passage}",
)
_FOLLOW_UPS = (
    "Can you make that shorter?",
    "Please rewrite your answer in simpler words.",
    "Give me an example of what you mean.",
    "Why is that so?",
    "Rewrite your answer as a list.",
    "What would somebody say who disagrees?",
    "Thanks! What should I do next?",
    "Now write the same for children.",
    "Are you sure? Check your answer and correct it if necessary.",
    "Turn your answer into a short e-mail to a colleague.",
    "Which part of that is most important?",
    "Tell me more about the first point.",
    "Summarize what you just said in one sentence.",
    "Write it again in a more formal tone.",
    "Start every sentence of your answer with the letter A.",
    "Ask me three questions to see whether I have understood it.",
)
