"""A text of the target's tokens in the tokens of another tokenizer, and back."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.runtime.tokenizer import TextTokenizer

# Of a character whose bytes are not all there, and how many there can be.
_BROKEN, _LONGEST_CHARACTER = "\ufffd", 4

# Target tokens that are encoded when reading begins; the draft reads no more of what it has missed.
_FIRST = 64
# Target tokens that are settled at once, at least and at most; behind them as many are encoded again every time.
_LEAST_SETTLED, _MOST_SETTLED = 16, 32


class ReencodedText:
    """Reads a growing text as a draft with another tokenizer would, and writes what that drafts for the target.

    How the end of a text splits into tokens depends on what follows, so the end is encoded again whenever it grows.
    Further back tokens are *settled*: they stay as they are, whatever follows, and with them the draft's KV cache. Any
    split that spells the same text is good enough to draft from.

    Special tokens go by their texts. One that the draft does not have is not read.
    """

    def __init__(self, target: TextTokenizer, own: TextTokenizer, target_size: int, own_size: int) -> None:
        """Translate between two tokenizers.

        Args:
            target: that of the text.
            own: that of the draft.
            target_size: ids of the target; others are never written.
            own_size: ids of the draft; others are never read.
        """
        self._target, self._own = target, own
        self._target_size, self._own_size = target_size, own_size
        ids = {text: token for token, text in own.special_texts.items()}
        self._shared = {token: text for token, text in target.special_texts.items() if text in ids}
        self._written = {ids[text]: token for token, text in self._shared.items()}
        self._start = 0  # where in the text reading began
        self._read: list[int] = []  # the target's tokens that are settled, from there on
        self._settled: list[int] = []  # the draft's tokens that spell them
        self._marks: list[tuple[int, int]] = []  # lengths of both, between which nothing straddles; none before reading
        self._last: tuple[list[int], list[int]] = ([], [])

    def read(self, text: Sequence[int]) -> list[int]:
        """The draft's tokens for a text of the target's; none while the text ends within a character.

        They may begin somewhere in the text, and go on from those of the last call where the text does.
        """
        if text != self._last[0]:
            self._last = (list(text), self._encode_again(text))
        return self._last[1]

    def write(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft says behind ``before``, both in the draft's tokens.

        What is left of a character at the end is not written yet. A special token that the target does not have ends
        what can be written.
        """
        stop = next((index for index, token in enumerate(drafted) if self._own.is_special(token)), len(drafted))
        text = _text(self._own, before, drafted[:stop])
        whole = text.partition(_BROKEN)[0]
        tokens = _inside(self._target, whole) if whole else []
        if stop < len(drafted) and whole == text and drafted[stop] in self._written:
            tokens.append(self._written[drafted[stop]])
        return _below(tokens, self._target_size)

    def ends(self, token: int) -> bool:
        """Whether nothing is written behind one of the draft's tokens."""
        return self._own.is_special(token)

    def steps_per_token(self, text: str) -> float:
        """How many of the draft's tokens spell one of the target's, in this text."""
        return max(1, len(self._own.encode(text, False))) / max(1, len(self._target.encode(text, False)))

    def _encode_again(self, text: Sequence[int]) -> list[int]:
        common = self._common(text)
        while self._marks and self._marks[-1][0] > common:
            self._marks.pop()
        if not self._marks or len(text) - self._start - self._marks[-1][0] > 2 * _FIRST:
            self._begin(text)
        settled, own_settled = self._marks[-1]
        del self._read[settled:], self._settled[own_settled:]
        while self._settle(text):
            pass
        rest = self._string(text[self._start + len(self._read) :])
        if rest.endswith(_BROKEN):
            return []
        # An id beyond the embedding is a damaged tokenizer's: the text then ends before it.
        return [*self._settled, *_below(_inside(self._own, rest) if rest else [], self._own_size)]

    def _common(self, text: Sequence[int]) -> int:
        """How many of the settled tokens the text still has; -1 if it is shorter than where reading began."""
        own = text[self._start : self._start + len(self._read)]
        if len(text) < self._start:
            return -1
        return next((i for i, (a, b) in enumerate(zip(own, self._read, strict=False)) if a != b), len(own))

    def _begin(self, text: Sequence[int]) -> None:
        """Begin to read near the end of a text, with a whole character."""
        self._read, self._settled, self._marks = [], [], [(0, 0)]
        first = max(0, len(text) - _FIRST)
        later = range(first, min(first + _LONGEST_CHARACTER, len(text)) if first else 1)
        self._start = next((i for i in later if not self._string(text[i:]).startswith(_BROKEN)), first)

    def _settle(self, text: Sequence[int]) -> bool:
        """Settle some tokens more; false if too few are left, or they cannot be parted from what follows."""
        rest = text[self._start + len(self._read) :]
        if len(rest) < 2 * _MOST_SETTLED:
            return False
        string = self._string(rest)
        whole = _inside(self._own, string)
        best: tuple[int, list[int]] | None = None
        for count in range(_MOST_SETTLED, _LEAST_SETTLED - 1, -1):
            piece = self._string(rest[:count])
            if piece.endswith(_BROKEN) or not string.startswith(piece):
                continue
            tokens = _inside(self._own, piece) if piece else []
            best = best or (count, tokens)
            if whole[: len(tokens)] == tokens:
                best = (count, tokens)
                break
        if best is None or _below(best[1], self._own_size) != best[1]:
            return False
        self._read.extend(rest[: best[0]])
        self._settled.extend(best[1])
        self._marks.append((len(self._read), len(self._settled)))
        return True

    def _string(self, tokens: Sequence[int]) -> str:
        """The text of some of the target's tokens behind those that are settled."""
        pieces: list[str] = []
        run: list[int] = []
        before: Sequence[int] = self._read
        for token in tokens:
            if not self._target.is_special(token):
                run.append(token)
                continue
            pieces += [_text(self._target, before, run), self._shared.get(token, "")]
            before, run = [], []
        return "".join([*pieces, _text(self._target, before, run)])


def _text(tokenizer: TextTokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ordinary tokens behind others."""
    if not tokens:
        return ""
    if tokenizer.joins_bytes or not before or tokenizer.is_special(before[-1]):
        return tokenizer.decode(tokens)
    # A run of byte tokens is decoded as a whole.
    start = len(before) - 1
    while start and tokenizer.is_byte_fallback(before[start]):
        start -= 1
    context = before[start:]
    return tokenizer.decode([*context, *tokens])[len(tokenizer.decode(context)) :]


def _inside(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Tokens of a text in the middle of another: without the space that many tokenizers put in front of a text."""
    if not tokenizer.puts_first:
        return tokenizer.encode(text, add_special_tokens=False)
    anchor = tokenizer.encode("\n", add_special_tokens=False)
    anchored = tokenizer.encode("\n" + text, add_special_tokens=False)
    if anchored[: len(anchor)] == anchor:
        return anchored[len(anchor) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _below(tokens: list[int], size: int) -> list[int]:
    """The tokens before the first one that does not exist."""
    return tokens[: next((index for index, token in enumerate(tokens) if token >= size), len(tokens))]
