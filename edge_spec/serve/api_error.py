"""Errors as OpenAI's API tells them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edge_spec.errors import MissingDependencyError, PromptTooLongError, RequestError

# Where the engine's name of an option is not that of the request's field.
_FIELDS = {"max_new_tokens": "max_tokens", "grammar": "response_format"}
_FIRST_WORD = re.compile(r"[a-z_]+")


class ApiError(Exception):
    """An answer that says what is wrong.

    Attributes:
        status: HTTP status.
        message: for a person: what was given, what was expected, what to do.
        param: the field of the request that is wrong; ``None`` if it is no single one.
        code: for a program; ``None`` if there is none.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {"error": {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    def content(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(self.body()).encode()


def of_request(error: Exception, param: str | None = None) -> ApiError | None:
    """Return what to answer if ``error`` is the client's fault, else ``None``.

    Args:
        error: what the engine raised.
        param: the field it is about, if that is known; else it is the option that the message begins with.
    """
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param, "context_length_exceeded")
    if isinstance(error, MissingDependencyError):
        return ApiError(400, f"This server cannot do that: {error}", param, "unsupported")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param or _option(str(error)), "invalid_value")
    return None


def internal() -> ApiError:
    """The server's own fault, of which the client is told no more."""
    return ApiError(500, "The server failed while answering; its log says why.", code="internal_error")


def shutting_down() -> ApiError:
    """The server is about to end."""
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})


def _option(message: str) -> str | None:
    from edge_spec.runtime.options import GenerationOptions

    word = _FIRST_WORD.match(message)
    name = word.group() if word else ""
    return _FIELDS.get(name, name) if name in GenerationOptions.__annotations__ else None


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
