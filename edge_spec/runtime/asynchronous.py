"""Streams for asyncio: chunks are computed in threads, so the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from edge_spec.runtime.completion import Chunk, Completion


async def chunks_of(begin: Callable[[], Iterator[Chunk]]) -> AsyncIterator[Chunk]:
    """Read a stream in a thread of its own, a chunk each time the caller asks for one.

    Closing the iterator, or cancelling the task that reads it, ends the generation after the call it is in.

    Args:
        begin: begins the stream; also run in the thread, since encoding a long prompt takes a while.

    Raises:
        EdgeSpecError: what the stream raises.
    """
    loop = asyncio.get_running_loop()
    # A thread that waits for its turn blocks no others, which a shared pool's would.
    executor = ThreadPoolExecutor(1, thread_name_prefix="edge-spec-stream")
    stream: Iterator[Chunk] | None = None

    def step() -> Chunk | None:
        nonlocal stream
        if stream is None:
            stream = begin()
        return next(stream, None)

    def close() -> None:
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    try:
        while (chunk := await loop.run_in_executor(executor, step)) is not None:
            yield chunk
    finally:
        executor.submit(close)  # behind the step that may still be running
        executor.shutdown(wait=False)


async def completion_of(chunks: AsyncIterator[Chunk]) -> Completion:
    """Read a stream to its end and return the completion that its last chunk carries."""
    completion = None
    async for chunk in chunks:
        completion = chunk.completion
    assert completion is not None  # every stream ends with one
    return completion
