"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from edge_spec.runtime.logprobs import TokenLogprobs

# JSON knows no infinity.
_LOWEST = -9999.0


class LogprobShapes:
    """Writes log-probabilities; a token is shown by its text, with U+FFFD for parts of characters, and its bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """Write for one tokenizer; ``token_bytes`` gives a token's bytes."""
        self._token_bytes = token_bytes

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return them as the chat API has them."""
        content = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def completion(self, logprobs: Iterable[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
        """Return them as the older API has them, and where the next token's text begins.

        Args:
            logprobs: of consecutive tokens.
            offset: where the first one's text begins, in characters of the answer.
        """
        tokens, values, tops, offsets = [], [], [], []
        for entry in logprobs:
            text = self._text(entry.token_id)
            tokens.append(text)
            values.append(max(entry.logprob, _LOWEST))
            tops.append({self._text(token): max(logprob, _LOWEST) for token, logprob in reversed(entry.top)})
            offsets.append(offset)
            offset += len(text)
        shape = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
        return shape, offset

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._token_bytes(token_id)
        return {
            "token": written.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(written),
        }

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode("utf-8", "replace")
