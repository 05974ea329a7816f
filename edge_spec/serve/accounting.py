"""Keeps the books: every request is counted and logged once it is over, whatever became of it."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_spec.serve.api_error import internal
from edge_spec.serve.metrics import Metrics
from edge_spec.serve.request_record import RequestRecord

_LOG = logging.getLogger(__name__)

# Programs ask for these all the time.
_QUIET = frozenset({"/health", "/ready", "/metrics", "/status"})


class Accounting:
    """Middleware that counts and logs requests, and answers for what nobody caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Keep the books of an app."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write down what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope["method"], scope["path"][:200])
        state = scope.setdefault("state", {})
        state["record"] = record
        begun, whole = False, not _has_body(scope)

        async def reading() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def observed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, record.status = True, message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                if not whole:  # the rest of a body that nobody wants could go on for ever
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, reading, observed)
        except Exception as error:
            record.error = type(error).__name__
            _LOG.exception("a request failed", extra={"fields": {"id": record.id, "path": record.path}})
            if not begun:
                fault = internal()
                await Response(fault.content(), fault.status, media_type="application/json")(scope, receive, observed)
        finally:
            record.client = state.get("client", "")
            self._metrics.count(record)
            level = logging.DEBUG if record.path in _QUIET and record.status == 200 else logging.INFO
            _LOG.log(level, "request", extra={"fields": record.fields()})


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that is being answered."""
    record: RequestRecord = request.state.record
    return record
