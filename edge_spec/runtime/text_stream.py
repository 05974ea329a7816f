"""Text of a growing sequence of tokens, piece by piece, as it becomes final."""

from __future__ import annotations

from edge_spec.runtime.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens one at a time and ends before the first stop string.

    The pieces, concatenated, are ``tokenizer.decode`` of all tokens, cut before the stop string that is complete
    first (the longest, if several are complete at the same character). A piece is only given out when no further
    token can change it: it never holds half a UTF-8 character, nor any part of the stop string that ends the text.

    Tokens are decoded in a window: the unsettled ones, after a few settled ones that give the decoder its left
    context, unless the tokenizer says that it only joins bytes.

    Args:
        tokenizer: decodes the tokens; special tokens have no text.
        stop: non-empty strings.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.finished = False
        self._tokenizer = tokenizer
        self._joins_bytes = tokenizer.joins_bytes
        self._stop = stop
        self._context: list[int] = []
        self._context_text = ""
        self._unsettled: list[int] = []
        self._unsettled_text: str | None = ""  # None: not decoded yet
        self._withheld = ""  # settled text that may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became final, often none. After a stop string, nothing happens."""
        if self.finished or self._tokenizer.is_special(token_id):
            return ""
        if self._tokenizer.is_byte_fallback(token_id):
            # A run of byte tokens is decoded as a whole: one bad byte turns all of it into U+FFFD.
            self._unsettled.append(token_id)
            self._unsettled_text = None
            return ""
        settled = ""
        text = self._decode([*self._unsettled, token_id])
        if self._unsettled:
            # Behind half a character that was settled as such, the token would seem to complete that one.
            broken = self._context_text.endswith(_REPLACEMENT)
            alone = self._tokenizer.decode([token_id]) if broken else self._decode([token_id])
            if self._held() + alone == text:
                # The token does not continue the character in front of it: whatever that lacks will never come.
                settled = self._settle()
                text = alone
        self._unsettled.append(token_id)
        self._unsettled_text = text
        if not text.endswith(_REPLACEMENT):  # otherwise perhaps a character whose other bytes are still to come
            settled += self._settle()
        return self._give_out(settled)

    def flush(self) -> str:
        """End the text and return what was held back. A character that is still incomplete becomes U+FFFD."""
        if self.finished:
            return ""
        piece = self._give_out(self._settle())
        if not self.finished:
            piece += self._withheld
            self.text += self._withheld
            self._withheld = ""
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([*self._context, *ids])[len(self._context_text) :]

    def _held(self) -> str:
        """Text of the unsettled tokens if nothing followed."""
        if self._unsettled_text is None:
            self._unsettled_text = self._decode(self._unsettled)
        return self._unsettled_text

    def _settle(self) -> str:
        """Move the unsettled tokens into the left context and return their text."""
        text = self._held()
        if not self._joins_bytes:
            # A token without text is no context for the next.
            self._context = self._unsettled if text else [*self._context, *self._unsettled]
            self._context_text = self._tokenizer.decode(self._context)
        self._unsettled = []
        self._unsettled_text = ""
        return text

    def _give_out(self, settled: str) -> str:
        """Pass settled text on, up to the first stop string and without what may be the beginning of one."""
        if not self._stop:
            self.text += settled
            return settled
        text = self._withheld + settled
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self.finished = True
            piece, self._withheld = text[: min(matches)[1]], ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            piece, self._withheld = text[: len(text) - keep], text[len(text) - keep :]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
