"""Runs the app until it is told to stop, and then ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from edge_spec.errors import RequestError
from edge_spec.serve.desk import Desk

_LOG = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
# What connections get to send their last words once their requests have been cancelled.
_LAST_WORDS_SECONDS = 5.0
_BACKLOG = 256
_LAST_PORT = 65535


class Server(uvicorn.Server):
    """Serves an app; :meth:`stop` ends it in order."""

    def __init__(self, app: FastAPI, grace_seconds: float, ready: Callable[[], None] = lambda: None) -> None:
        """Serve an app.

        Args:
            app: as built by ``create_app``.
            grace_seconds: how long requests may take to end once the server is told to stop.
            ready: is called once it serves.
        """
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=int(grace_seconds + _LAST_WORDS_SECONDS) + 1,
            )
        )
        self._desk: Desk = app.state.desk
        self._grace_seconds, self._ready = grace_seconds, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def stop(self) -> None:
        """Take nothing in any more, let what runs end within the grace period, and then return from :meth:`serve`."""
        if not self.should_exit:
            self._desk.closing = True
            self.should_exit = True
            asyncio.get_running_loop().call_later(self._grace_seconds, self._desk.cancel_all)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to :func:`run`: uvicorn would raise them again after all has ended in order."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Open the port; 0 takes any.

    Raises:
        RequestError: it cannot be opened.
    """
    if not 0 <= port <= _LAST_PORT:
        raise RequestError(f"--port is {port}, expected 0 to {_LAST_PORT}; 0 takes any.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
            opened.listen(_BACKLOG)
        except BaseException:
            opened.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"Cannot listen on {host} port {port} ({reason}); choose another with --port.") from None
    return opened


def run(server: Server, opened: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM comes; a second one ends the process at once.

    Args:
        server: what to run, in the main thread.
        opened: the port.
    """

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told_to_stop)
        await server.serve([opened])

    def told_to_stop() -> None:
        if server.should_exit:
            _LOG.warning("told to stop again: ending at once")
            os._exit(EXIT_INTERRUPTED)  # a thread in the middle of a call cannot be ended otherwise
        _LOG.info("told to stop: running requests may end")
        server.stop()

    asyncio.run(serve())
