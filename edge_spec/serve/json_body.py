"""Reads the body of a request: bounded in size and time, whatever the client says of it, and checked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from edge_spec.serve.api_error import ApiError

Fields = TypeVar("Fields", bound=BaseModel)

# A body takes milliseconds to send; whoever takes longer keeps a connection busy.
_READ_SECONDS = 30.0
# What is too large is read on for a while and forgotten, since many clients read the answer only behind it.
_DISCARDED = 16
_LONGEST_REASON = 500
_LONGEST_PLACE = 200
_KINDS = frozenset({"str", "int", "float", "bool", "list"})


async def read_body(request: Request, limit: int) -> bytes:
    """Read a JSON body.

    Args:
        request: where it comes from.
        limit: its largest size, in bytes.

    Raises:
        ApiError: it is not declared as JSON, is too large, or takes too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page of somebody else can send other kinds without asking first.
        raise ApiError(415, f"The content type is {kind or 'missing'!r}, expected 'application/json'.")
    try:
        return await asyncio.wait_for(_read(request, limit), _READ_SECONDS)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(408, f"The body did not come within {_READ_SECONDS:.0f} seconds.") from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared[:20]) > limit
    parts, size = [], 0
    with suppress(StopAsyncIteration):
        stream = request.stream()
        while True:
            part = await anext(stream)
            size += len(part)
            too_large = too_large or size > limit
            if not too_large:
                parts.append(part)
            elif size > _DISCARDED * limit:
                break
            else:
                parts.clear()
    if too_large:
        raise ApiError(
            413,
            f"The request has more than {limit} bytes; send less, or start the server with a larger "
            "--max-request-bytes.",
            code="request_too_large",
        )
    return b"".join(parts)


def parse(kind: type[Fields], body: bytes) -> Fields:
    """Read the fields of a request.

    Raises:
        ApiError: the body is no JSON, or not such a request; the error names the first field that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    # A value that may be of several kinds has a problem with each; the one furthest inside is about the right kind.
    first = max(problems, key=lambda problem: len(problem["loc"]))
    place = _place(first["loc"])
    if first["type"] == "json_invalid":
        raise ApiError(400, f"The body is not valid JSON: {first['msg']}.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"Unrecognized request argument: {place}", place, "unknown_parameter")
    reason = first["msg"].removeprefix("Value error, ")[:_LONGEST_REASON]
    raise ApiError(400, f"{place or 'The body'}: {reason}", place or None, "invalid_value")


def _place(steps: Sequence[int | str]) -> str:
    """Fields and indices of a place, without the kinds that a value could have been."""
    names = [str(step) for step in steps if isinstance(step, int) or (step.isidentifier() and step not in _KINDS)]
    return ".".join(names)[:_LONGEST_PLACE]
