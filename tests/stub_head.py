"""A target that tells hidden states, and a head that reads them, as plain functions of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_spec.errors import RequestError
from edge_spec.runtime.draft_vocabulary import WHOLE, DraftVocabulary
from edge_spec.runtime.drafters.head import HeadDrafter
from edge_spec.runtime.tap_rows import TapRows
from stub_model import LogitsOf, StubCache, StubModel

History = tuple[int, ...]
Row = tuple[History, bool, int]  # the text up to a token, whether the head itself said it, and the id that follows

OWN = 0.5  # what sets the head's own features apart


class Histories:
    """Numbers for texts, which fit a hidden state."""

    def __init__(self) -> None:
        self._numbers: dict[History, int] = {}
        self._texts: list[History] = []

    def number(self, text: Sequence[int]) -> float:
        key = tuple(text)
        if key not in self._numbers:
            self._numbers[key] = len(self._texts)
            self._texts.append(key)
        return float(self._numbers[key])

    def text(self, number: float) -> History:
        return self._texts[int(number)]


class TappedCache(StubCache):
    """Its hidden state of a token is the number of the text up to that token."""

    def __init__(self, histories: Histories, limit: int) -> None:
        super().__init__()
        self.taps = TapRows(1, limit)
        self._histories = histories

    def tell(self) -> None:
        """Tell the hidden states of tokens that came since."""
        start = min(self.taps.stop, self.length)
        tokens = self.tokens
        rows = [[self._histories.number(tokens[: token + 1])] for token in range(start, self.length)]
        self.taps.append(start, [np.array(rows, np.float32).reshape(-1, 1)])

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self.taps.rollback(length)

    def keep(self, length: int, slots: Sequence[int]) -> None:
        super().keep(length, slots)
        self.taps.rollback(length)
        self.tell()


class TappedModel(StubModel):
    """A target whose caches keep hidden states."""

    def __init__(self, logits_of: LogitsOf, histories: Histories, limit: int = 512, **options: Any) -> None:
        super().__init__(logits_of, **options)
        self.histories = histories
        self._limit = limit
        self.cache: TappedCache = self.new_cache()

    def new_cache(self) -> TappedCache:
        return TappedCache(self.histories, self._limit)

    def forward(self, token_ids: Sequence[int], *arguments: Any, **options: Any) -> np.ndarray:
        self.cache.taps.rollback(self.cache.length)
        logits = super().forward(token_ids, *arguments, **options)
        self.cache.tell()
        return logits


class HeadCache:
    """Rows as they were read; a smaller length takes rows back."""

    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self.rows: list[Row] = []

    @property
    def memory_bytes(self) -> int:
        return self.capacity

    def slots_for(self, length: int) -> int:
        return length

    def bytes_of(self, slots: int) -> int:
        return slots

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RequestError(f"Cannot roll the cache back to {length} rows; it holds {self.length}.")
        self.length = length


class StubHead:
    """Computes a row from all rows that the cache holds, and refuses one that does not continue them."""

    width = hidden = 1

    def __init__(
        self, logits_of: Callable[[Sequence[Row]], np.ndarray], histories: Histories, context: int = 1000
    ) -> None:
        self.context = context
        self.cache = HeadCache()
        self.calls: list[tuple[int, int]] = []  # rows with hidden states of the target, and without
        self._logits_of = logits_of
        self._histories = histories

    def forward(
        self,
        token_ids: Sequence[int],
        logit_rows: Sequence[int],
        taps: np.ndarray | None = None,
        features: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        cache = self.cache
        told = np.empty((0, 1), np.float32) if taps is None else taps
        own = np.empty((0, 1), np.float32) if features is None else features
        assert len(token_ids) == len(told) + len(own) <= min(64, self.context - cache.length)
        assert all(state % 1 == 0 for state in told[:, 0]) and all(state % 1 == OWN for state in own[:, 0])
        del cache.rows[cache.length :]
        for state, token in zip(np.concatenate([told, own])[:, 0], token_ids, strict=True):
            text = self._histories.text(float(state))
            if cache.rows:
                before, _, following = cache.rows[-1]
                assert text == (*before, following), "this row does not continue the one before it"
            cache.rows.append((text, bool(state % 1 == OWN), token))
        past, cache.length = cache.length, len(cache.rows)
        cache.capacity = max(cache.capacity, cache.length)
        self.calls.append((len(told), len(own)))
        wanted = [cache.rows[: past + row + 1] for row in logit_rows]
        features = [[self._histories.number([*rows[-1][0], rows[-1][2]]) + OWN] for rows in wanted]
        logits = [self._logits_of(rows) for rows in wanted]
        return np.array(logits, np.float32), np.array(features, np.float32).reshape(-1, 1)

    def new_cache(self) -> HeadCache:
        return HeadCache()

    def use(self, cache: HeadCache) -> None:
        self.cache = cache

    def shrink(self, cache: HeadCache, slots: int = 0) -> None:
        cache.length = min(cache.length, slots)
        cache.capacity = min(cache.capacity, slots)


def head_for(
    target: TappedModel,
    logits_of: LogitsOf,
    window: int | None = None,
    vocabulary: DraftVocabulary = WHOLE,
    kind: type[HeadDrafter] = HeadDrafter,
) -> HeadDrafter:
    """A drafter whose head says what a function of the text says."""
    head = StubHead(lambda rows: logits_of([*rows[-1][0], rows[-1][2]]), target.histories)
    return kind(head, target, window, vocabulary=vocabulary)  # type: ignore[arg-type]
