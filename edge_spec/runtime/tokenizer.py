"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_spec.errors import BundleError, RequestError
from edge_spec.tokenizer_check import check_tokenizer, panics_as_errors, reason

# Byte-level tokenizers write each byte as a character that can be printed: itself, or one from 256 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
_REPLACEMENT = "\ufffd"


class TextTokenizer:
    """A ``tokenizer.json``.

    Attributes:
        joins_bytes: whether a text is the bytes of its tokens, one after the other. If not, a token's text depends on
            the tokens in front of it (most decoders drop the space in front of the first one).
        puts_first: whether a text may get a space in front before it is split.
        special_texts: what special tokens look like where they are written out, by id.

    Args:
        path: the file.

    Raises:
        BundleError: the file is missing or not a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers.decoders import ByteLevel

        if not Path(path).is_file():
            raise BundleError(f"{path} is missing, expected a tokenizer; export the bundle again")
        try:
            self._load(path)
        except Exception as error:  # the library raises plain Exception
            raise BundleError(
                f"{path} is not a readable tokenizer ({reason(error)}); export the bundle again"
            ) from error
        # Texts of single tokens that have one. Texts repeat their tokens, and the library takes its time for each.
        self._texts: dict[int, str] = {}
        self.joins_bytes = isinstance(self._tokenizer.decoder, ByteLevel)
        self.puts_first = not self.joins_bytes or self.decode(self.encode("a", add_special_tokens=False)) != "a"

    def _load(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        with panics_as_errors():
            self._tokenizer = Tokenizer.from_file(str(path))
            check_tokenizer(self._tokenizer)
            # Some checkpoints ship a tokenizer set up for training batches.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self.special_texts = {token_id: token.content for token_id, token in added.items() if token.special}
            self._byte_fallback = self._find_byte_fallback()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; special tokens written out in it are recognized.
            add_special_tokens: also add those the tokenizer puts around every text (usually BOS). A rendered chat
                template already holds them.

        Raises:
            RequestError: not text, or text that cannot be written as UTF-8 (lone surrogates).
            BundleError: the tokenizer is damaged and fails.
        """
        if not isinstance(text, str):
            raise RequestError(f"the text to encode is a {type(text).__name__}, expected a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds {text[error.start]!r} at index {error.start}, which is half a character; "
                "expected text that can be written as UTF-8"
            ) from error
        try:
            with panics_as_errors():
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:
            raise BundleError(
                f"the bundle's tokenizer cannot encode this text ({reason(error)}); export it again"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; ids the tokenizer does not know, nothing.

        Raises:
            RequestError: an id is not an integer that fits 32 bits without sign.
            BundleError: the tokenizer is damaged and fails.
        """
        single = skip_special_tokens and len(ids) == 1
        if single and ids[0] in self._texts:
            return self._texts[ids[0]]
        try:
            with panics_as_errors():
                text = str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise _no_ids(error) from error
        except Exception as error:
            raise BundleError(
                f"the bundle's tokenizer cannot decode its ids ({reason(error)}); export it again"
            ) from error
        if single and text:
            self._texts[ids[0]] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text that has begun; see :meth:`bytes_of_each`."""
        return self.bytes_of_each([token_id])[0]

    def bytes_of_each(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each of these tokens adds to a text that has begun, in UTF-8; possibly a part of a character.

        A special token is what is written in a text to get it. Ids the tokenizer does not know are nothing, and so are
        parts of characters where the decoder does not tell which.

        Raises:
            RequestError: an id is not an integer that fits 32 bits without sign.
            BundleError: the tokenizer is damaged and fails.
        """
        try:
            pieces = [self._tokenizer.id_to_token(token_id) for token_id in token_ids]
        except (OverflowError, TypeError) as error:
            raise _no_ids(error) from error
        # Behind another token, since most decoders drop the space in front of the first one.
        before = self.encode("a", add_special_tokens=False)[-1:]
        known = len(self.decode(before))
        behind = [] if self.joins_bytes else self.decode_each([[*before, token_id] for token_id in token_ids])
        found = []
        for index, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True)):
            if piece is None:
                found.append(b"")
            elif token_id in self.special_texts:
                found.append(self.special_texts[token_id].encode())
            elif self.joins_bytes:
                is_known = all(character in _BYTES for character in piece)  # the decoder takes others as they are
                found.append(bytes(_BYTES[character] for character in piece) if is_known else piece.encode())
            elif self.is_byte_fallback(token_id):
                found.append(bytes([int(piece[3:5], 16)]))
            else:
                text = behind[index][known:]
                found.append(b"" if _REPLACEMENT in text and _REPLACEMENT not in piece else text.encode())
        return found

    def decode_each(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """What ``decode`` says of many short texts, in a fraction of the time.

        Raises:
            BundleError: the tokenizer is damaged and fails.
        """
        try:
            with panics_as_errors():
                return list(self._tokenizer.decode_batch([list(ids) for ids in texts]))
        except Exception as error:
            raise BundleError(
                f"the bundle's tokenizer cannot decode its ids ({reason(error)}); export it again"
            ) from error

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` leaves the token out: a special token, or an id the tokenizer does not know."""
        if token_id in self._texts:
            return False
        return token_id in self.special_texts or self._tokenizer.id_to_token(token_id) is None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for a single byte, and its text depends on the whole run of such tokens."""
        return token_id in self._byte_fallback

    def _find_byte_fallback(self) -> frozenset[int]:
        ids = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("A")]
        # The tokens may be in the vocabulary without the decoder treating them as bytes.
        if letter is None or self._tokenizer.decode([letter]) != "A":
            return frozenset()
        return frozenset(token_id for token_id in ids if token_id is not None)


def _no_ids(error: Exception) -> RequestError:
    return RequestError(f"token ids must be integers from 0 to 2**32 - 1 ({error})")
