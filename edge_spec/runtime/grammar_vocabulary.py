"""A tokenizer's tokens as bytes, which is how a grammar looks at them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_spec.errors import RequestError
from edge_spec.runtime.grammar import bounded, import_llguidance
from edge_spec.runtime.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Most of a vocabulary can stand inside of a JSON string. llguidance checks these tokens as one, if it is told so: that
# makes masks in strings of limited length 15 times as fast, and costs next to no memory.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']


class GrammarVocabulary:
    """The tokens of one tokenizer, prepared when a grammar is first used.

    Attributes:
        end_token_ids: the tokens that end a text, the usual one first.
        size: ids there are; what a model has beyond them is padding.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Sequence[int], usual_end: str | None = None) -> None:
        """Remember a tokenizer.

        Args:
            tokenizer: the target's.
            end_token_ids: tokens that end a text.
            usual_end: what the one that mostly does looks like.
        """
        texts = tokenizer.special_texts
        self.end_token_ids = tuple(sorted(end_token_ids, key=lambda token: (texts.get(token) != usual_end, token)))
        self.size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._prepared: LLTokenizer | None = None
        self._first = _FirstTokens()
        self._twins = _Twins()

    def matcher(self, definition: str) -> LLMatcher:
        """A matcher at the beginning of a text.

        Args:
            definition: a grammar as llguidance reads it.

        Raises:
            RequestError: the grammar takes too much, or this tokenizer cannot end a text.
            MissingDependencyError: llguidance is not installed.
        """
        llguidance = import_llguidance()
        prepared = self._prepare()
        matcher: LLMatcher = llguidance.LLMatcher(prepared, definition, log_level=0, limits=_limits())
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {bounded(matcher.get_error())}. Make it simpler.")
        return matcher

    def spelled(self, output: Sequence[int]) -> list[int]:
        """The tokens whose bytes are the text of ``output``. Only its first token may differ; it may be missing."""
        tokens = list(output)
        if not tokens or tokens[0] not in self._first.instead:
            return tokens
        instead = self._first.instead[tokens[0]]
        return tokens[1:] if instead is None else [instead, *tokens[1:]]

    def completed(self, bits: NDArray[np.uint8], first: bool) -> NDArray[np.uint8]:
        """Which tokens may come next, as :meth:`GrammarWalk.allowed` has it, from what a matcher says of their bytes.

        A matcher knows one token of several with the same bytes. And many tokenizers in the manner of SentencePiece
        leave out the space that a text begins with: there a first token has the text of another one, or none at all.

        Args:
            bits: the matcher's answer.
            first: whether the token comes first.
        """
        twins, odd = self._twins, self._first
        if not (len(twins.tokens) or (first and len(odd.odd))):
            return bits
        allowed = np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)
        any_twin = np.zeros(twins.count, np.bool_)
        np.logical_or.at(any_twin, twins.group, allowed[twins.tokens])
        allowed[twins.tokens] = any_twin[twins.group]
        if first:
            goes_on = allowed.sum() > allowed[list(self.end_token_ids)].sum()
            named = allowed[odd.names]
            allowed[odd.odd] = False
            allowed[odd.renamed] = named
            allowed[odd.silent] = goes_on
        return np.packbits(allowed, bitorder="little")

    def tokens_of(self, text: bytes) -> list[int]:
        """The tokens that bytes within a text are most likely written with."""
        return list(self._prepare().tokenize_bytes(text))

    def _prepare(self) -> LLTokenizer:
        with self._lock:
            if self._prepared is None:
                if not self.end_token_ids:
                    raise RequestError(
                        "This bundle names no token that ends a text, so a text could not end where its grammar does. "
                        "Export it from a checkpoint whose generation_config.json has an eos_token_id."
                    )
                texts = self._tokenizer.bytes_of_each(range(self.size))
                self._first = _first_tokens(self._tokenizer, texts)
                self._twins = _Twins(texts, self._tokenizer.special_texts)
                wrapper = _Wrapper(self._tokenizer, texts, self.end_token_ids[0])
                self._prepared = import_llguidance().LLTokenizer(
                    wrapper, eos_token=list(self.end_token_ids), slices=_SLICES
                )
                wrapper.tokens = []  # read, and not needed again
            return self._prepared


class _Twins:
    """Tokens with the same bytes as others: in SentencePiece, those of single bytes and of letters.

    Attributes:
        tokens, group: such tokens, and for each the number of its group.
        count: groups there are.
    """

    def __init__(self, texts: Sequence[bytes] = (), special: Container[int] = ()) -> None:
        by_text: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts):
            if text and token not in special:
                by_text.setdefault(text, []).append(token)
        groups = [tokens for tokens in by_text.values() if len(tokens) > 1]
        self.tokens = np.array([token for tokens in groups for token in tokens], np.int64)
        self.group = np.repeat(np.arange(len(groups)), [len(tokens) for tokens in groups])
        self.count = len(groups)


class _FirstTokens:
    """Tokens with another text where they come first.

    Attributes:
        instead: by such a token, the one that has its text elsewhere; ``None`` if it has no text.
        odd: all tokens of another text, also those whose text no token has.
        renamed, names: those with a text that another token has, and that token.
        silent: those without a text.
    """

    def __init__(self, instead: dict[int, int | None] | None = None, odd: Sequence[int] = ()) -> None:
        self.instead = instead or {}
        self.odd = np.array(odd, np.int64)
        named = [(token, name) for token, name in self.instead.items() if name is not None]
        self.renamed = np.array([token for token, _ in named], np.int64)
        self.names = np.array([name for _, name in named], np.int64)
        self.silent = np.array([token for token, name in self.instead.items() if name is None], np.int64)


def _first_tokens(tokenizer: TextTokenizer, texts: Sequence[bytes]) -> _FirstTokens:
    if tokenizer.joins_bytes:
        return _FirstTokens()
    spaced = [token for token, text in enumerate(texts) if text[:1] == b" " and token not in tokenizer.special_texts]
    named = {text: token for token, text in enumerate(texts) if text and token not in tokenizer.special_texts}
    odd: list[int] = []
    instead: dict[int, int | None] = {}
    for token, text in zip(spaced, tokenizer.decode_each([[token] for token in spaced]), strict=True):
        alone = text.encode()
        if alone == texts[token]:
            continue
        odd.append(token)
        if not alone:
            instead[token] = None
        elif alone in named:
            instead[token] = named[alone]
    return _FirstTokens(instead, odd)


class _Wrapper:
    """What llguidance asks of a tokenizer that is not its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, tokens: list[bytes], end: int) -> None:
        self.eos_token_id = end
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.special_texts)
        self._tokenizer = tokenizer
        # A text may get a space in front, which one that goes on has not. Behind a line break, which joins nothing,
        # the tokens are those that it goes on with.
        self._before = "\n" if tokenizer.puts_first else ""
        self._skipped = tokenizer.encode(self._before, add_special_tokens=False) if self._before else []

    def __call__(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode(self._before + text, add_special_tokens=False)
        skipped = len(self._skipped)
        # A tokenizer that cannot write the text, or not behind a line break, has no say in how it is written.
        written = tokens[:skipped] == self._skipped and self._tokenizer.decode(tokens, False).endswith(text)
        return tokens[skipped:] if written else []


def _limits() -> object:
    # Short errors hold no part of the text. A row that may go on in more ways than this takes tens of milliseconds, and
    # a longer text of such a grammar ever more; schemas have dozens of ways. The time to make a matcher grows with
    # the square of a grammar's symbols: so many, about a schema of a thousand properties, take a tenth of a second.
    return import_llguidance().LLParserLimits(verbose_errors=False, max_items_in_row=300, max_grammar_size=10_000)
