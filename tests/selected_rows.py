"""Rows as a graph that selects gives them, made by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_spec.runtime.logit_rows import SelectedRows
from stub_model import StubModel


def selected(rows: np.ndarray, count: int, dice: np.random.Generator, off: float = 0.0) -> SelectedRows:
    """Rows float32 [R, columns] by their ``count`` likeliest tokens.

    Ties come in any order, and the log-sum-exp is off by a share of what single precision allows.
    """
    mixed = dice.permutation(rows.shape[1])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        order = mixed[np.argsort(-rows[:, mixed], axis=1, kind="stable")][:, :count]
        peak = rows.max(axis=1, keepdims=True, initial=-np.inf)
        total = np.exp(rows.astype(np.float64) - peak).sum(axis=1) * (1.0 + off * rows.shape[1] * 2.0**-24)
        log_sum_exp = (np.log(total) + peak[:, 0]).astype(np.float32)
    values = np.take_along_axis(rows, order, axis=1)
    return SelectedRows(order.astype(np.int64), values, log_sum_exp, rows.shape[1], lambda row: rows[row])


class SelectingModel(StubModel):
    """A stub that gives selected rows, and counts the whole ones that were asked for."""

    def __init__(self, *arguments: Any, count: int = 16, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._count = count
        self._dice = np.random.default_rng(0)
        self._last: SelectedRows | None = None
        self._fetched = 0
        self.rows = 0

    @property
    def fetched(self) -> int:
        return self._fetched + (0 if self._last is None else self._last.fetched)

    def forward(self, token_ids: Sequence[int], logit_rows: Sequence[int], *others: Any) -> Any:
        whole = super().forward(token_ids, logit_rows, *others)
        if not len(logit_rows):
            return whole
        self._fetched = self.fetched
        self._last = selected(whole, self._count, self._dice)
        self.rows += len(logit_rows)
        return self._last
