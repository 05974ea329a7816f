"""What happens to the target's logits before temperature: penalties, bias, an app's own processors, masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import LogitsError, NoTokenLeftError
from edge_spec.runtime.app_processor import LogitsProcessor as LogitsProcessor
from edge_spec.runtime.app_processor import checked_processors, run_processor
from edge_spec.runtime.history import History
from edge_spec.runtime.logit_rows import LogitRows, TopTokens, top_of
from edge_spec.runtime.penalties import penalize, penalize_known
from edge_spec.runtime.sampling_params import SamplingParams


class Mask(Protocol):
    """Which tokens may follow a text, such as a grammar tells."""

    def allowed(self, history: History, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """A pure function of the text: bool [n], where ids from n on are not allowed; ``None`` excludes nothing.

        Args:
            history: the text that the row's block follows.
            path: the drafted tokens that the row follows beyond it.

        Raises:
            LogitsError: it cannot be told.
        """
        ...


class LogitsPipeline:
    """All of a request's changes to the logits, prepared once.

    The order is: repetition, frequency and presence penalties, logit bias, the app's processors, allowed and banned
    tokens, grammar. Masks come last, so that nothing brings a banned token back. Temperature, top-k, top-p and min-p
    follow in :func:`edge_spec.runtime.sampling.probabilities`.

    Attributes:
        active: whether any logits are ever changed.
        lift: the most that is added to any logit; ``None`` if that depends on more than the request's numbers.
    """

    def __init__(
        self, params: SamplingParams, processors: Iterable[LogitsProcessor] = (), grammar: Mask | None = None
    ) -> None:
        """Prepare a request.

        Args:
            params: penalties, bias and masks.
            processors: called in this order.
            grammar: what the output has to obey.

        Raises:
            RequestError: a processor is not callable.
        """
        self._params = params
        self._processors = checked_processors(processors)
        self._grammar = grammar
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._banned = np.array(params.banned_token_ids, np.int64)
        self._allowed: NDArray[np.int64] | None = None
        if params.allowed_token_ids is not None:  # then all others are out, and need no ban
            allowed = set(params.allowed_token_ids) - set(params.banned_token_ids)
            self._allowed, self._banned = np.array(sorted(allowed), np.int64), np.zeros(0, np.int64)
        self.active = bool(
            params.penalizes
            or self._processors
            or len(self._bias)
            or len(self._banned)
            or self._allowed is not None
            or grammar is not None
        )
        rewards = params.repetition_penalty < 1.0 or min(params.presence_penalty, params.frequency_penalty) < 0.0
        self.lift = None if rewards or self._processors else float(self._bias.max(initial=0.0))

    def process(
        self, logits: NDArray[np.float32], history: History, paths: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Apply everything to all rows, each on its own history; see :class:`ProcessedRows`.

        Returns:
            float32 [R, vocab]; ``logits`` itself if there is nothing to do.
        """
        if not self.active or not len(logits):
            return logits
        return ProcessedRows(self, logits, history, paths).all()

    def process_row(
        self,
        logits: NDArray[np.float32],
        history: History,
        path: Sequence[int],
        row: int = 0,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Apply everything to one row.

        Args:
            logits: float32 [vocab], the model's own; never changed.
            history: the text that the row's block follows.
            path: the drafted tokens that the row follows beyond it.
            row: number of the row, for errors.
            out: float32 [vocab], where to put the result if there is something to do; a new array by default.

        Returns:
            float32 [vocab], with a finite maximum; ``logits`` itself if there is nothing to do.

        Raises:
            NoTokenLeftError: every token is excluded.
            LogitsError: the model's logits have no finite maximum, or a processor or the grammar failed.
        """
        if not self.active:
            return logits
        position = len(history.tokens) + len(path)
        peak = float(logits.max())
        if not np.isfinite(peak):
            raise LogitsError(
                f"the largest logit is {peak}, expected a finite number: the model's computation broke down on this "
                "device; use another device, or export the bundle again with a finer recipe",
                row,
                position,
            )
        values = np.empty_like(logits) if out is None else out
        values[:] = logits
        if self._params.penalizes:
            penalize(values, history, path, self._params)
        values[self._bias_ids] += self._bias
        for processor in self._processors:
            values[:] = run_processor(processor, [*history.tokens, *path], values.copy(), row)
        if self._allowed is not None:
            kept = values[self._allowed]
            values.fill(-np.inf)
            values[self._allowed] = kept
        values[self._banned] = -np.inf
        if self._grammar is not None:
            _exclude(self._grammar, values, history, path, row)
        if values.max() == -np.inf:
            who = "" if self._grammar is None else "grammar, "
            raise NoTokenLeftError(
                f"no token is left to choose: {who}allowed_token_ids, banned_token_ids and logits processors exclude "
                "them all; leave at least one at every step (an end-of-text token, if nothing else)",
                row,
                position,
            )
        return values

    def process_known(
        self,
        ids: NDArray[np.int64],
        logits: NDArray[np.float32],
        history: History,
        path: Sequence[int],
        row: int = 0,
    ) -> NDArray[np.float32]:
        """Apply everything to some tokens of a row: what :meth:`process_row` makes of them, bit for bit.

        Only without processors of the app's own, which look at whole rows.

        Args:
            ids: int64 [n], ascending.
            logits: float32 [n], theirs; never changed.
            history: as there.
            path: as there.
            row: as there.

        Returns:
            float32 [n], which may all be -inf.

        Raises:
            LogitsError: the grammar failed.
        """
        assert not self._processors
        values = logits.copy()
        if self._params.penalizes:
            penalize_known(ids, values, history, path, self._params)
        if len(self._bias_ids):
            known = np.isin(self._bias_ids, ids)
            values[np.searchsorted(ids, self._bias_ids[known])] += self._bias[known]
        if self._allowed is not None:
            values[~np.isin(ids, self._allowed)] = -np.inf
        if len(self._banned):
            values[np.isin(ids, self._banned)] = -np.inf
        if self._grammar is not None:
            allowed = _allowed(self._grammar, history, path, row)
            if allowed is not None:
                values[ids >= len(allowed)] = -np.inf
                within = np.flatnonzero(ids < len(allowed))
                values[within[~allowed[ids[within]]]] = -np.inf
        return values


class ProcessedRows:
    """The rows of one target call, each processed when it is first read.

    A rule that stops at the first rejection pays for no row behind it, and an error in such a row, which plain
    decoding would never have met, stays unseen. A row behind a token that is excluded in its parent row can never
    be reached; it is left as it is, and no processor is called for it.
    """

    def __init__(
        self,
        pipeline: LogitsPipeline,
        logits: LogitRows,
        history: History,
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Wrap a target's answer.

        Args:
            pipeline: what to apply.
            logits: R rows, the model's own; never changed, and read until the last row is processed.
            history: the text that all rows follow.
            paths: R sequences of drafted tokens, what each row follows beyond ``history``
                (:func:`~edge_spec.runtime.history.chain_paths`, :func:`~edge_spec.runtime.history.tree_paths`).
        """
        self._pipeline = pipeline
        self._logits = logits
        self._history = history
        self._paths = [tuple(path) for path in paths]
        self._row_of_path = {path: row for row, path in enumerate(self._paths)}
        self._processed: Any = np.empty(logits.shape, np.float32) if pipeline.active else logits
        self._done: set[int] = set()
        self._tops: dict[int, TopTokens | None] = {}
        self._reachable: dict[int, bool] = {}  # for the rows that were read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """Return the processed logits of a row, float32 [vocab]; see :meth:`LogitsPipeline.process_row` for errors."""
        processed: NDArray[np.float32] = self._processed[row]
        if self._pipeline.active and row not in self._done:
            if self._is_reachable(row):
                self._pipeline.process_row(self._logits[row], self._history, self._paths[row], row, processed)
            else:
                processed[:] = self._logits[row]
            self._done.add(row)
        return processed

    def top(self, row: int) -> TopTokens | None:
        """What is known of a processed row without looking at all of it; ``None`` if it takes the whole row."""
        if row not in self._tops:
            self._tops[row] = self._processed_top(row)
        return self._tops[row]

    def likeliest(self, row: int) -> int | None:
        """The likeliest token of a processed row, the lowest id among equals; ``None`` if it takes the whole row."""
        top = self.top(row)
        return None if top is None else top.likeliest

    def _processed_top(self, row: int) -> TopTokens | None:
        top, lift = top_of(self._logits, row), self._pipeline.lift
        if top is None or lift is None:
            return None
        if not self._is_reachable(row):
            return top
        values = self._pipeline.process_known(top.ids, top.logits, self._history, self._paths[row], row)
        # Rounded sums grow with their terms, so no bias takes another logit higher than it would take the ceiling.
        ceiling = top.ceiling + np.float32(lift)
        return TopTokens(top.ids, values, ceiling, top.given, top.log_sum_exp, lift)

    def all(self) -> NDArray[np.float32]:
        """Return all rows, processed, float32 [R, vocab]."""
        for row in range(len(self)):
            self[row]
        processed: NDArray[np.float32] = self._processed
        return processed

    def _is_reachable(self, row: int) -> bool:
        if row not in self._reachable:
            path = self._paths[row]
            parent = self._row_of_path.get(path[:-1], row)
            self._reachable[row] = parent == row or (self._allows(parent, path[-1]) and self._is_reachable(parent))
        return self._reachable[row]

    def _allows(self, row: int, token: int) -> bool:
        """Whether a token may follow a row."""
        top = self.top(row)
        known = None if top is None else top.allows(token)
        return bool(self[row][token] > -np.inf) if known is None else known


def _exclude(mask: Mask, values: NDArray[np.float32], history: History, path: Sequence[int], row: int) -> None:
    """Set what a mask does not allow to -inf, in place."""
    allowed = _allowed(mask, history, path, row)
    if allowed is not None:
        known = values[: len(allowed)]
        np.copyto(known, -np.inf, where=~allowed[: len(known)])
        values[len(allowed) :] = -np.inf


def _allowed(mask: Mask, history: History, path: Sequence[int], row: int) -> NDArray[np.bool_] | None:
    try:
        return mask.allowed(history, path)
    except LogitsError as error:
        raise type(error)(error.problem, row, len(history.tokens) + len(path)) from error.__cause__
