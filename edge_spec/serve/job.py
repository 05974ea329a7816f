"""A request on its way through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.serve.fair_queue import FairQueue, Place

Streams = Sequence[Iterator[Chunk]]
# A chunk with the number of its answer; None where there is nothing new.
Arrival = tuple[int, Chunk] | None


@dataclass
class Times:
    """When what happened, in seconds of a monotonic clock; ``None``: not yet.

    Attributes:
        arrived: the request was read.
        began: it had its turn.
        first_token: its first token was there.
        ended: its last one was.
    """

    arrived: float = field(default_factory=time.monotonic)
    began: float | None = None
    first_token: float | None = None
    ended: float | None = None


class Job:
    """Generates a request's answers, one after the other, in a thread, and hands what comes to the event loop.

    It ends by itself when its reader is gone: whoever holds it calls :meth:`cancel` in any case.

    Attributes:
        completions: of the answers that are complete.
        times: when what happened.
    """

    def __init__(self, queue: FairQueue, place: Place, threads: Executor, streams: Streams) -> None:
        """Begin; the job waits for its turn and generates as a task of the running event loop.

        Args:
            queue: where the place is from.
            place: the request's place, given back at the end.
            threads: where to generate; it has a thread for each that can have a turn.
            streams: the answers.
        """
        self.completions: list[Completion] = []
        self.times = Times()
        self._queue, self._place, self._threads, self._streams = queue, place, threads, streams
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Arrival] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def chunks(self, first: float, then: float) -> AsyncGenerator[Arrival, None]:
        """Yield chunks, each with the number of its answer, and ``None`` where none has come for some time.

        Args:
            first: seconds to wait for the first one.
            then: seconds to wait for each of the others.

        Raises:
            Exception: what the engine raised.
        """
        patience = first
        getting = asyncio.ensure_future(self._events.get())
        try:
            while True:
                # Not wait_for, which before Python 3.12 may forget that it was cancelled.
                done, _ = await asyncio.wait({getting}, timeout=patience)
                patience = then
                if not done:
                    yield None
                    continue
                arrival = getting.result()
                if arrival is None:
                    break
                getting = asyncio.ensure_future(self._events.get())
                yield arrival
        finally:
            getting.cancel()
        await self.ended()
        self._task.result()

    @property
    def cancelled(self) -> bool:
        """Whether somebody has said that nobody wants the answer."""
        return self._place.cancelled.is_set()

    def cancel(self) -> None:
        """End it: the engine is free after the round it is in. Cancelling what has ended does no harm."""
        self._queue.cancel(self._place)

    async def ended(self) -> None:
        """Wait until the engine is free of it, however it ended."""
        await asyncio.wait({self._task})

    def when_ended(self, then: Callable[[], object]) -> None:
        """Call a function once the engine is free of it."""
        self._task.add_done_callback(lambda task: (task.exception(), then()))

    async def _run(self) -> None:
        try:
            if await self._queue.wait(self._place):
                self.times.began = time.monotonic()
                await self._loop.run_in_executor(self._threads, self._generate)
        finally:
            self.times.ended = time.monotonic()
            self._queue.leave(self._place)
            self._events.put_nowait(None)

    def _generate(self) -> None:
        """Read the answers, in a thread."""
        for index, stream in enumerate(self._streams):
            if self.cancelled:
                return
            for chunk in stream:
                if chunk.token_ids and self.times.first_token is None:
                    self.times.first_token = time.monotonic()
                if chunk.completion is not None:
                    self.completions.append(chunk.completion)
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, chunk))
