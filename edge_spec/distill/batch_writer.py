"""The target writes answers to many prompts at once, and what it computes on the way is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.target_batch import TargetBatch

# A question is drawn as it comes; at lower temperatures all of them are about the same few things.
_ASKING_TEMPERATURE = np.float32(1.0)
# A text that says the same over and over is ended: a period of at most so many tokens, at least four times, and so many
# tokens in all.
_LONGEST_PERIOD = 20
_REPEATS = 4
_SHORTEST_LOOP = 24


@dataclass(frozen=True)
class OwnQuestion:
    """One that the target writes itself: what follows it, at least one token, and how many tokens it has at most."""

    behind: Sequence[int]
    most: int


@dataclass(frozen=True)
class Prompt:
    """What is to be answered next.

    Attributes:
        number: decides its dice.
        token_ids: the prompt, or what stands before the question.
        question: what the target asks behind that; ``None`` where all is said.
    """

    number: int
    token_ids: Sequence[int]
    question: OwnQuestion | None = None


@dataclass
class _Open:
    """A text that is being written.

    Attributes:
        number: of its prompt.
        prompt_length: tokens up to where the next thing was begun to be written, a question or the answer.
        token_ids: what there is.
        greedy: how it is answered.
        dice: what is drawn by.
        question: what is being asked; ``None`` before an answer.
        said: tokens that come next, whatever the target thinks of them.
        over: whether the answer is there.
    """

    number: int
    prompt_length: int
    token_ids: list[int]
    greedy: bool
    dice: np.random.Generator
    question: OwnQuestion | None = None
    said: list[int] = field(default_factory=list)
    over: bool = False

    @property
    def written(self) -> int:
        """Tokens of what is being written."""
        return len(self.token_ids) - self.prompt_length


class BatchWriter:
    """Keeps the slots of a target busy.

    A text depends on its prompt, its number and the seed, and on the number of slots only as far as rounding goes: all
    slots take part in every step, whether they hold a text or not.
    """

    def __init__(
        self,
        target: TargetBatch,
        end_tokens: Collection[int],
        max_new_tokens: int,
        seed: int,
        temperature: float = 0.7,
    ) -> None:
        """Write with a target.

        Args:
            target: nobody else uses its slots meanwhile.
            end_tokens: which end an answer.
            max_new_tokens: longest answer.
            seed: of the dice.
            temperature: of about half of the texts, which draw from the 64 likeliest tokens; the others are greedy.
        """
        self._target = target
        self._ends = frozenset(end_tokens)
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._temperature = np.float32(temperature)
        self._texts: dict[int, _Open] = {}
        shape = target.slots, target.capacity
        self._taps = np.zeros((*shape, len(target.taps) * target.hidden_size), np.float16)
        self._top_ids = np.zeros((*shape, target.top_tokens), np.int32)
        self._top_log_probs = np.zeros((*shape, target.top_tokens), np.float16)

    def write(self, next_prompt: Callable[[], Prompt | None]) -> Iterator[tuple[int, TappedText]]:
        """Yield the number and the text of each prompt, in the order in which they end.

        Args:
            next_prompt: gives a prompt that leaves room for an answer, or ``None`` if there is none now. It is asked
                again after every step, until it has none while no text is being written.
        """
        slots = self._target.slots
        token_ids = np.zeros(slots, np.int64)
        while True:
            for slot in range(slots):
                if slot not in self._texts:
                    prompt = next_prompt()
                    if prompt is None:
                        break
                    self._begin(slot, prompt)
            if not self._texts:
                return
            for slot, text in self._texts.items():
                token_ids[slot] = text.token_ids[-1]
            at = self._target.lengths.copy()
            rows = self._target.advance(token_ids)
            busy = sorted(self._texts)
            self._taps[busy, at[busy]] = rows.taps[busy]
            self._top_ids[busy, at[busy]] = rows.top_ids[busy]
            self._top_log_probs[busy, at[busy]] = rows.top_log_probs[busy]
            for slot in busy:
                text = self._texts[slot]
                if text.over:  # its last token has been read too
                    yield text.number, self._finish(slot)
                else:
                    self._choose(text, rows.top_ids[slot], rows.top_logits[slot])

    def _begin(self, slot: int, prompt: Prompt) -> None:
        """Read a prompt into a slot and choose the first token of its answer."""
        dice = np.random.default_rng([self._seed, prompt.number])
        length = len(prompt.token_ids)
        greedy = bool(dice.random() < 0.5)
        text = _Open(prompt.number, length, list(prompt.token_ids), greedy, dice, prompt.question)
        rows = self._target.read(slot, prompt.token_ids)
        self._taps[slot, :length] = rows.taps
        self._top_ids[slot, length - 1] = rows.top_ids[-1]
        self._top_log_probs[slot, length - 1] = rows.top_log_probs[-1]
        self._choose(text, rows.top_ids[-1], rows.top_logits[-1])
        self._texts[slot] = text

    def _choose(self, text: _Open, top_ids: np.ndarray, top_logits: np.ndarray) -> None:
        """Append the next token of a text, and note whether it was the last one."""
        if text.said:
            _say(text)
        elif text.question is not None:
            self._ask(text, text.question, int(top_ids[_draw(top_logits, _ASKING_TEMPERATURE, text.dice)]))
        else:
            place = 0 if text.greedy else _draw(top_logits, self._temperature, text.dice)
            text.token_ids.append(int(top_ids[place]))
            text.over = self._ends_with(text, self._max_new_tokens)

    def _ask(self, text: _Open, question: OwnQuestion, token: int) -> None:
        """Go on with a question, or say what is behind it in the place of its end."""
        if token not in self._ends:
            text.token_ids.append(token)
            if not self._ends_with(text, question.most):
                return
        text.question, text.said = None, list(question.behind)
        if token in self._ends:
            _say(text)

    def _ends_with(self, text: _Open, most: int) -> bool:
        """Whether what is being written ends with its last token."""
        return text.token_ids[-1] in self._ends or text.written >= most or loops(text.token_ids, text.written)

    def _finish(self, slot: int) -> TappedText:
        """Take a text out of its slot."""
        text = self._texts.pop(slot)
        self._target.free(slot)
        length = len(text.token_ids)
        top_ids, top_log_probs = self._top_ids[slot, :length].copy(), self._top_log_probs[slot, :length].copy()
        top_ids[: text.prompt_length - 1] = 0
        top_log_probs[: text.prompt_length - 1] = 0
        token_ids, taps = np.array(text.token_ids, np.int32), self._taps[slot, :length].copy()
        return TappedText(token_ids, text.prompt_length, taps, top_ids, top_log_probs)


def _say(text: _Open) -> None:
    """Append what comes next; behind the last of it begins the answer."""
    text.token_ids.append(text.said.pop(0))
    text.prompt_length = len(text.token_ids)


def _draw(logits: np.ndarray, temperature: np.float32, dice: np.random.Generator) -> int:
    """Draw a place in logits that descend."""
    shares = np.cumsum(np.exp((logits - logits[0]) / temperature, dtype=np.float64))
    return min(int(np.searchsorted(shares, dice.random() * shares[-1], "right")), len(shares) - 1)


def loops(token_ids: Sequence[int], answer: int) -> bool:
    """Tell whether a text has come to repeat itself in its last ``answer`` tokens."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_REPEATS * period, _SHORTEST_LOOP)
        if length > answer:
            return False
        if token_ids[-1] == token_ids[-1 - period] and (
            token_ids[-length:-period] == token_ids[len(token_ids) - length + period :]
        ):
            return True
    return False
