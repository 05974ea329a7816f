"""The target writes answers to many prompts at once, and what it computes on the way is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.target_batch import TargetBatch

# A text that says the same over and over is ended: a period of at most so many tokens, at least four times, and so many
# tokens in all.
_LONGEST_PERIOD = 20
_REPEATS = 4
_SHORTEST_LOOP = 24


@dataclass(frozen=True)
class Prompt:
    """What is to be answered next: its number, which decides its dice, and token ids."""

    number: int
    token_ids: Sequence[int]


@dataclass
class _Open:
    """A text that is being written."""

    number: int
    prompt_length: int
    token_ids: list[int]
    greedy: bool
    dice: np.random.Generator
    over: bool = False


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
        text = _Open(prompt.number, length, list(prompt.token_ids), bool(dice.random() < 0.5), dice)
        rows = self._target.read(slot, prompt.token_ids)
        self._taps[slot, :length] = rows.taps
        self._top_ids[slot, : length - 1] = 0
        self._top_log_probs[slot, : length - 1] = 0
        self._top_ids[slot, length - 1] = rows.top_ids[-1]
        self._top_log_probs[slot, length - 1] = rows.top_log_probs[-1]
        self._choose(text, rows.top_ids[-1], rows.top_logits[-1])
        self._texts[slot] = text

    def _choose(self, text: _Open, top_ids: np.ndarray, top_logits: np.ndarray) -> None:
        """Append the next token of a text, and note whether it was the last one."""
        place = 0
        if not text.greedy:
            shares = np.cumsum(np.exp((top_logits - top_logits[0]) / self._temperature, dtype=np.float64))
            place = min(int(np.searchsorted(shares, text.dice.random() * shares[-1], "right")), len(shares) - 1)
        token = int(top_ids[place])
        text.token_ids.append(token)
        answer = len(text.token_ids) - text.prompt_length
        text.over = token in self._ends or answer >= self._max_new_tokens or loops(text.token_ids, answer)

    def _finish(self, slot: int) -> TappedText:
        """Take a text out of its slot."""
        text = self._texts.pop(slot)
        self._target.free(slot)
        length = len(text.token_ids)
        return TappedText(
            np.array(text.token_ids, np.int32),
            text.prompt_length,
            self._taps[slot, :length].copy(),
            self._top_ids[slot, :length].copy(),
            self._top_log_probs[slot, :length].copy(),
        )


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
