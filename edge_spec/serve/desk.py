"""Takes requests in, within the limits of the queue, and sees that all of them end when the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from edge_spec.serve.api_error import ApiError, shutting_down
from edge_spec.serve.fair_queue import FairQueue, Place, QueueFullError
from edge_spec.serve.job import Job, Streams

Result = TypeVar("Result")

# Requests are read, and their prompts tokenized, beside the event loop; more threads would only take turns at it.
_READING_THREADS = 2


class Desk:
    """Takes requests in. Belongs to the thread of one event loop.

    Attributes:
        queue: the places in front of the engine.
        closing: whether the server is about to end; nothing is taken in any more.
    """

    def __init__(self, parallel: int, queue_limit: int) -> None:
        """Open it.

        Args:
            parallel: how many requests are in the engine at once.
            queue_limit: how many may wait besides.
        """
        self.queue = FairQueue(parallel, queue_limit)
        self.closing = False
        self._reading = ThreadPoolExecutor(_READING_THREADS, "edge-spec-read")
        self._answering = ThreadPoolExecutor(parallel, "edge-spec-answer")
        self._jobs: set[Job] = set()

    def enter(self, client: str) -> Place:
        """Give a request a place.

        Raises:
            ApiError: there is none.
        """
        if self.closing:
            raise shutting_down()
        try:
            return self.queue.enter(client)
        except QueueFullError as error:
            raise ApiError(
                429,
                f"The server is busy: {self.queue.running} requests are being answered and {self.queue.waiting} wait. "
                f"Try again in {error.retry_after} s.",
                code="queue_full",
                headers={"Retry-After": str(error.retry_after)},
            ) from None

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Do something that takes a while, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, work)

    def begin(self, place: Place, streams: Streams) -> Job:
        """Have a request answered; the place belongs to the job from now on."""
        job = Job(self.queue, place, self._answering, streams)
        self._jobs.add(job)
        job.when_ended(lambda: self._jobs.discard(job))
        return job

    async def finish(self, job: Job) -> None:
        """Cancel a job unless it has ended, and wait until the engine is free of it."""
        job.cancel()
        await asyncio.shield(job.ended())

    def cancel_all(self) -> None:
        """End every job, since the server ends."""
        for job in self._jobs:
            job.cancel()

    async def close(self) -> None:
        """End what is left, and the threads."""
        self.closing = True
        self.cancel_all()
        for job in list(self._jobs):
            with suppress(asyncio.CancelledError):
                await job.ended()
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._answering.shutdown(wait=False, cancel_futures=True)
