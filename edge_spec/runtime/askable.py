"""The ways to ask for text, all by way of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING

from edge_spec.runtime.asynchronous import chunks_of, completion_of
from edge_spec.runtime.chat_template import checked_messages
from edge_spec.runtime.completion import Chunk, Completion, last_completion
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.prompt import Message, Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Askable(ABC):
    """What an engine and a session have in common."""

    @abstractmethod
    def stream(
        self, prompt_or_messages: Prompt | Sequence[Message], **options: Unpack[GenerationOptions]
    ) -> Iterator[Chunk]:
        """Generate, yielding a chunk per target call; see :meth:`edge_spec.Engine.stream`."""

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Completion:
        """Continue ``prompt`` and return the whole completion; see :meth:`edge_spec.Engine.stream` for the options."""
        return last_completion(self.stream(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> Completion:
        """Answer ``messages``, such as ``[{"role": "user", "content": "Hi"}]``, all of the conversation so far."""
        return last_completion(self.stream(checked_messages(messages), **options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Completion:
        """As :meth:`generate`, for asyncio."""
        return await completion_of(self.astream(prompt, **options))

    async def achat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> Completion:
        """As :meth:`chat`, for asyncio."""
        return await completion_of(self.astream(checked_messages(messages), **options))

    def astream(
        self, prompt_or_messages: Prompt | Sequence[Message], **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """As :meth:`edge_spec.Engine.stream`, for asyncio: the event loop goes on while a chunk is computed.

        Cancelling the task that reads it, or closing the iterator (``aclose``), ends the generation.
        """
        return chunks_of(lambda: self.stream(prompt_or_messages, **options))
