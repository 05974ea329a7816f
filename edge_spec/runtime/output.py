"""Decides where a text ends, and turns emitted tokens into text on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from edge_spec.runtime.completion import FinishReason
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.text_stream import TextStream
from edge_spec.runtime.tokenizer import TextTokenizer


class Output:
    """What one generation has emitted so far.

    Tokens arrive in blocks, and the text may end at any token of one: what lies behind is not emitted. Where it ends
    is decided token by token, so it does not depend on how the tokens were divided into blocks. Only deadline and
    cancellation depend on time: no token is emitted after either.

    Attributes:
        token_ids: emitted tokens.
        limit: most tokens it will emit.
        finish_reason: why the text ended; ``None`` while it goes on.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        room: int,
        *,
        cancelled: Callable[[], bool] | None = None,
        started: float | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Start an empty output. It has ended already if no token is wanted.

        Args:
            tokenizer: decodes the tokens.
            sampling: brings stop strings, stop tokens, the most tokens wanted and the deadline.
            eos_token_ids: tokens that end a text.
            room: most tokens the context has room for.
            cancelled: asked before every token, whether to end (for example the ``is_set`` of a ``threading.Event``).
            started: when the request came, by ``clock``; by default now.
            clock: tells the time, in seconds.
        """
        self.token_ids: list[int] = []
        self.limit = min(sampling.max_new_tokens, room)
        self.finish_reason: FinishReason | None = None if self.limit else "length"
        self._late = ""  # text that became final while nobody asked for it
        self._stream = TextStream(tokenizer, sampling.stop)
        self._ends = frozenset((*eos_token_ids, *sampling.stop_token_ids))
        self._cancelled = cancelled
        self._clock = clock
        self._deadline: float | None = None
        if sampling.deadline is not None:
            self._deadline = (clock() if started is None else started) + sampling.deadline

    @property
    def text(self) -> str:
        """Text that is final so far."""
        return self._stream.text

    def push(self, tokens: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Emit a round's tokens up to the end of the text; after that, nothing happens.

        Returns:
            The text that each emitted token made final, possibly none, and these tokens. What ends a text without a
            token of its own (its time is over) may add one more piece.
        """
        pieces = []
        before = len(self.token_ids)
        for token in tokens:
            held = self.poll()
            if self.finish_reason is not None:
                pieces += [held] if held else []
                break
            self.token_ids.append(token)
            if token in self._ends:  # not part of the text, whether the tokenizer calls it special or not
                pieces.append(self._end("stop"))
                break
            piece = self._stream.push(token)
            if self._stream.finished:
                piece += self._end("stop")
            elif len(self.token_ids) == self.limit:
                piece += self._end("length")
            pieces.append(piece)
        return tuple(pieces), tuple(self.token_ids[before:])

    def poll(self) -> str:
        """End the text if it was cancelled or its time is over: to be called before each round.

        Returns:
            The text that became final by that: what was held back, since more might have followed.
        """
        if self.finish_reason is not None:
            late, self._late = self._late, ""
            return late
        if self._cancelled is not None and self._cancelled():
            return self._end("cancelled")
        if self._deadline is not None and self._clock() >= self._deadline:
            return self._end("deadline")
        return ""

    def has_ended(self) -> bool:
        """Whether the text has ended; it does if it was cancelled or its time is over. The next poll has its last text.

        For while it waits.
        """
        if self.finish_reason is None:
            self._late = self.poll()
        return self.finish_reason is not None

    def _end(self, reason: FinishReason) -> str:
        piece = self._stream.flush()
        # A stop string may be complete only once the last bytes are settled.
        self.finish_reason = "stop" if self._stream.finished else reason
        return piece
