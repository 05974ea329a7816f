"""Sends an answer piece by piece, as server-sent events, for as long as somebody reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
# A comment: nobody reads it, but proxies see that the connection lives.
ALIVE = b": still here\n\n"


class ClientGoneError(Exception):
    """Whoever asked has closed the connection."""


def event(content: Any) -> bytes:
    """Write an event. In ASCII, since some clients take U+2028 for the end of a line."""
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for something as long as the client is there. The body has to have been read.

    Raises:
        ClientGoneError: the client has gone; the work is then cancelled.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that is a stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None], finish: Callable[[], Awaitable[None]]) -> None:
        """Send these pieces.

        Args:
            pieces: events.
            finish: is called at the end in any case, also where nobody asks for the first piece.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._finish = pieces, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, unless the client goes away."""
        try:
            with suppress(ClientGoneError, OSError):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._pieces.aclose()
            await self._finish()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
