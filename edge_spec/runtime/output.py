"""Decides where a text ends, and turns emitted tokens into text on the way."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.runtime.completion import FinishReason
from edge_spec.runtime.sampling import SamplingParams
from edge_spec.runtime.text_stream import TextStream
from edge_spec.runtime.tokenizer import TextTokenizer


class Output:
    """What one generation has emitted so far.

    Attributes:
        token_ids: emitted tokens.
        limit: most tokens it will emit.
        finish_reason: why the text ended; ``None`` while it goes on.
    """

    def __init__(
        self, tokenizer: TextTokenizer, sampling: SamplingParams, eos_token_ids: Sequence[int], room: int
    ) -> None:
        """Start an empty output.

        Args:
            tokenizer: decodes the tokens.
            sampling: brings the stop strings and the most tokens wanted.
            eos_token_ids: tokens that end a text.
            room: most tokens the context has room for.
        """
        self.token_ids: list[int] = []
        self.limit = min(sampling.max_new_tokens, room)
        self.finish_reason: FinishReason | None = None
        self._stream = TextStream(tokenizer, sampling.stop)
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def text(self) -> str:
        """Text that is final so far."""
        return self._stream.text

    def push(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Emit a round's tokens up to the end of the text.

        Returns:
            The text that became final, and the tokens that were emitted.
        """
        pieces = []
        before = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            is_end = token in self._eos_token_ids
            if not is_end:  # its text is never wanted, and not every tokenizer has it among the special tokens
                pieces.append(self._stream.push(token))
            if is_end or self._stream.finished:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                pieces.append(self._stream.flush())
                if self._stream.finished:  # a stop string may be complete only once the last bytes are settled
                    self.finish_reason = "stop"
                break
        return "".join(pieces), tuple(self.token_ids[before:])
