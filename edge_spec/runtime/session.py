"""A conversation whose cache is kept from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edge_spec.errors import RequestError
from edge_spec.runtime.askable import Askable
from edge_spec.runtime.cache_pool import CachedText
from edge_spec.runtime.completion import Chunk
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.prompt import Message, Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Session(Askable):
    """One of several conversations on an engine.

    Every request brings its whole text, as it does without a session; what the text has in common with the last one of
    this session is not read again. That never shows in the answer. An engine has room for a limited number of caches
    (``conversations`` of :func:`edge_spec.load`); a session that has lost its own to others reads its text again.
    """

    def __init__(
        self,
        text: CachedText,
        stream: Callable[[CachedText | None, Prompt | Sequence[Message], Mapping[str, Any]], Iterator[Chunk]],
        forget: Callable[[CachedText], None],
    ) -> None:
        """Begin a conversation; see :meth:`edge_spec.Engine.session`.

        Args:
            text: what its cache holds.
            stream: continues a prompt with this text's cache.
            forget: gives the cache back.
        """
        self._text = text
        self._stream = stream
        self._forget = forget
        self._closed = False

    @property
    def cached_tokens(self) -> int:
        """How many tokens its cache holds."""
        return len(self._text.tokens)

    def stream(
        self, prompt_or_messages: Prompt | Sequence[Message], **options: Unpack[GenerationOptions]
    ) -> Iterator[Chunk]:
        """As :meth:`edge_spec.Engine.stream`."""
        if self._closed:
            raise RequestError("This session is closed; begin another one with engine.session().")
        return self._stream(self._text, prompt_or_messages, options)

    def close(self) -> None:
        """Give its cache back, once an answer that is being written has ended. Closing twice does no harm."""
        if not self._closed:
            self._closed = True
            self._forget(self._text)

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()
